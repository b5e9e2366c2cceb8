"""The child process of a judge pool: ``python -m realhf.rewards.judge.server FN SECONDS [TEST_SECONDS]``.

It writes ``{"ready": true}`` or ``{"fatal": text}``, and then replies to each JSON line ``{prompt, answer, row}`` on
stdin with ``{"score": x}`` or ``{"error": text}``, with the ``traceback`` of an exception, on stdout. A group-wise
function gets ``{prompt, responses, row}``, and the reply has ``scores``. Output of the reward function goes to stderr.
The parent kills the process when a response exceeds its deadline; the process ends by itself when the parent exits.

For an ``async def`` function the first line includes ``"asynchronous": true``. The process then accepts further
requests while earlier ones are in progress, enforces the deadline of each (``{"timeout": true}``), and repeats the
``id`` of the request in the reply.
"""

import asyncio
import inspect
import json
import math
import numbers
import os
import resource
import signal
import sys
import threading
from collections.abc import Awaitable, Callable, Iterable, Mapping
from itertools import islice
from typing import Any

from realhf.base.child_process import (
    describe,
    die_with_parent,
    error_reply,
    limit,
    limit_cpu,
    send,
    take_over_streams,
)
from realhf.rewards.group.presets import GROUP_PRESETS
from realhf.rewards.registry import load_reward
from realhf.rewards.verdict import ScoreWithReason

MEMORY_LIMIT = 8 * 2**30  # bytes of private memory per process

AnyRewardFn = Callable[[str, Any, dict], Any]  # of a response, or of all responses to a prompt
AsyncRewardFn = Callable[[str, Any, dict], Awaitable[Any]]


def main(fn: str, seconds: float, test_seconds: float = math.inf) -> None:
    """Judge responses until stdin is closed."""
    requests, replies = take_over_streams()
    if os.getpgrp() != os.getpid():
        os.setpgrp()
    threading.Thread(target=die_with_parent, args=(requests, seconds), daemon=True).start()
    limit(resource.RLIMIT_DATA, MEMORY_LIMIT)
    try:
        preset = GROUP_PRESETS.get(fn)
        reward: Any = preset.load() if preset and preset.load else load_reward(fn, seconds, test_seconds)
    except (Exception, SystemExit) as error:
        send(replies, {"fatal": describe(error)})
        return
    if inspect.iscoroutinefunction(reward) or inspect.iscoroutinefunction(type(reward).__call__):
        send(replies, {"ready": True, "asynchronous": True})
        asyncio.run(serve_many(reward, requests, replies, seconds))
    else:
        send(replies, {"ready": True})
        with os.fdopen(requests, "rb") as lines:
            for line in lines:
                limit_cpu(seconds)
                send(replies, judge(reward, json.loads(line)))
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.killpg(os.getpgrp(), signal.SIGTERM)  # processes that the judged code left running


def judge(reward: AnyRewardFn, request: dict) -> dict[str, object]:
    """Return ``{"score": x}``, or ``{"error": text}`` if the function raised or did not return a finite number.

    For a group, ``{"scores": [x, ...]}``.
    """
    try:
        return reply_of(request, reward(*arguments_of(request)))
    except (Exception, SystemExit) as error:
        return error_reply(error)


async def serve_many(reward: AsyncRewardFn, requests: int, replies: int, seconds: float) -> None:
    """Judge responses concurrently until stdin is closed."""
    reader, loop = asyncio.StreamReader(limit=2**30), asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(requests, "rb"))
    tasks: set[asyncio.Task[None]] = set()

    async def serve(request: dict) -> None:
        send(replies, {**await judge_in_time(reward, request, seconds), "id": request.get("id")})

    async for line in reader:
        limit_cpu(seconds)
        tasks.add(task := loop.create_task(serve(json.loads(line))))
        task.add_done_callback(tasks.discard)
    await asyncio.gather(*tasks)


async def judge_in_time(reward: AsyncRewardFn, request: dict, seconds: float) -> dict[str, object]:
    """Return the reply to a request, or ``{"timeout": true}``."""

    async def judged() -> dict[str, object]:
        try:
            return reply_of(request, await reward(*arguments_of(request)))
        except (Exception, SystemExit) as error:
            return error_reply(error)

    try:
        return await asyncio.wait_for(judged(), seconds)
    except asyncio.TimeoutError:
        return {"timeout": True}


def arguments_of(request: dict) -> tuple[str, Any, dict]:
    """Return the arguments of the function, which may change its list: scores are counted by that of the request."""
    answers = [*request["responses"]] if "responses" in request else request["answer"]
    return request["prompt"], answers, request["row"]


def reply_of(request: dict, result: object) -> dict[str, object]:
    return scores_reply(result, len(request["responses"])) if "responses" in request else score_reply(result)


def scores_reply(scores: object, n: int) -> dict[str, object]:
    """Return the reply for the result of a group-wise function of ``n`` responses."""
    if not isinstance(scores, Iterable) or isinstance(scores, str | bytes | Mapping | set | frozenset):
        return {"error": f"the result is {scores!r:.100}, a {type(scores).__name__}; it must be a list of {n} numbers"}
    values = list(islice(scores, n + 1))
    if len(values) != n:
        found = "more" if len(values) > n else str(len(values))
        return {"error": f"the result has {found} scores, it must have one for each of the {n} responses"}
    replies = [score_reply(value) for value in values]
    for number, reply in enumerate(replies):
        if "error" in reply:
            return {"error": f"score {number}: {reply['error']}"}
    return {"scores": [reply["score"] for reply in replies]}


def score_reply(score: object) -> dict[str, object]:
    """Return the reply for the result of a reward function."""
    if not isinstance(score, numbers.Real):
        return {"error": f"the reward is {score!r:.100}, a {type(score).__name__}; it must be a number"}
    if not math.isfinite(score):
        return {"error": f"the reward is {float(score)}, it must be finite"}
    reason: dict[str, object] = {"reason": score.reason} if isinstance(score, ScoreWithReason) else {}
    return {"score": float(score), **reason}


if __name__ == "__main__":
    main(sys.argv[1], *map(float, sys.argv[2:]))
