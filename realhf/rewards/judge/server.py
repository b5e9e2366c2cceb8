"""The child process that judges answers: ``python -m realhf.rewards.judge.server FN SECONDS``.

It says ``{"ready": true}`` or ``{"fatal": text}``, and then answers every JSON line ``{prompt, answer, row}`` on stdin
with ``{"score": x}`` or ``{"error": text}`` on stdout. What the judged code prints goes to stderr. The parent kills it
when an answer takes too long; it dies by itself when the parent is gone.

An ``async def`` function says ``"asynchronous": true`` with its ``ready``: it takes further requests while earlier ones
wait, keeps the deadline of each (``{"timeout": true}``), and repeats the request's ``id`` in the reply.
"""

import asyncio
import importlib.util
import inspect
import json
import math
import numbers
import os
import re
import resource
import select
import signal
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from realhf.rewards.verdict import FORMAT, ScoreWithReason

MEMORY_LIMIT = 8 * 2**30  # bytes of private memory of one judge

RewardFn = Callable[[str, str, dict], float]
AsyncRewardFn = Callable[[str, str, dict], Awaitable[float]]


def main(fn: str, seconds: float) -> None:
    """Serve answers until stdin ends."""
    requests, replies = take_over_streams()
    if os.getpgrp() != os.getpid():
        os.setpgrp()
    threading.Thread(target=die_with_parent, args=(requests, seconds), daemon=True).start()
    limit(resource.RLIMIT_DATA, MEMORY_LIMIT)
    try:
        reward: Any = load_reward(fn, seconds)
    except (Exception, SystemExit) as error:
        send(replies, {"fatal": describe(error)})
        return
    if is_asynchronous(reward):
        send(replies, {"ready": True, "asynchronous": True})
        asyncio.run(serve_many(reward, requests, replies, seconds))
    else:
        send(replies, {"ready": True})
        with os.fdopen(requests, "rb") as lines:
            for line in lines:
                limit_cpu(seconds)
                send(replies, judge(reward, json.loads(line)))
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.killpg(os.getpgrp(), signal.SIGTERM)  # what the judged code left running


def judge(reward: RewardFn, request: dict) -> dict[str, object]:
    """Return ``{"score": x}``, or ``{"error": text}`` for a function that raised or did not return a finite number."""
    try:
        return graded(reward(request["prompt"], request["answer"], request["row"]))
    except (Exception, SystemExit) as error:
        return {"error": describe(error)}


def is_asynchronous(reward: object) -> bool:
    """Say whether calling ``reward`` gives a coroutine: it is an ``async def``, or an object that is called as one."""
    return inspect.iscoroutinefunction(reward) or inspect.iscoroutinefunction(type(reward).__call__)


async def serve_many(reward: AsyncRewardFn, requests: int, replies: int, seconds: float) -> None:
    """Serve answers until stdin ends, each from the moment it comes."""
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
    """Return what ``judge`` does, or ``{"timeout": true}``."""

    async def judged() -> dict[str, object]:
        try:
            return graded(await reward(request["prompt"], request["answer"], request["row"]))
        except (Exception, SystemExit) as error:
            return {"error": describe(error)}

    try:
        return await asyncio.wait_for(judged(), seconds)
    except asyncio.TimeoutError:
        return {"timeout": True}


def graded(score: object) -> dict[str, object]:
    """Return the reply for what a reward function returned."""
    if not isinstance(score, numbers.Real):
        return {"error": f"the reward is {score!r:.100}, a {type(score).__name__}; it must be a number"}
    if not math.isfinite(score):
        return {"error": f"the reward is {float(score)}, it must be finite"}
    reason: dict[str, object] = {"reason": score.reason} if isinstance(score, ScoreWithReason) else {}
    return {"score": float(score), **reason}


def load_reward(fn: str, seconds: float) -> RewardFn:
    """Return the function that ``math``, ``code`` or ``path/to/file.py:function`` names; it has ``seconds``."""
    if fn in ("code", "code_unordered"):
        from realhf.rewards.code.judge_code import CodeJudge

        return CodeJudge(seconds, lax=fn == "code_unordered").ready()
    if fn == "math":
        from realhf.rewards.math.judge_math import judge_math

        return judge_math
    if fn.startswith(FORMAT):
        pattern = re.compile(fn.removeprefix(FORMAT), re.DOTALL)
        return lambda prompt, answer, row: float(pattern.fullmatch(answer) is not None)
    path, _, name = fn.rpartition(":")
    spec = importlib.util.spec_from_file_location("realhf_user_reward", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    sys.path.append(str(Path(path).resolve().parent))
    spec.loader.exec_module(module)
    if not callable(function := vars(module).get(name)):
        raise AttributeError(f"{path} has no function '{name}'")
    return function


def take_over_streams() -> tuple[int, int]:
    """Return private copies of stdin and stdout; nothing else can read the requests or write among the replies."""
    requests, replies = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.dup2(2, 1)
    return requests, replies


def die_with_parent(requests: int, seconds: float) -> None:
    """Kill this process group when it still runs ``seconds`` after the other end of ``requests`` was closed."""
    poll = select.poll()
    poll.register(requests, 0)
    poll.poll()  # without events to wait for, only a hang-up ends it
    time.sleep(seconds)
    os.killpg(os.getpgrp(), signal.SIGKILL)


def limit_cpu(seconds: float) -> None:
    """Bound the CPU time of the next answer: a judge whose parent is gone and that never lets go of Python ends too."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    limit(resource.RLIMIT_CPU, math.ceil(used.ru_utime + used.ru_stime + (seconds + 1) * (os.cpu_count() or 1)))


def limit(what: int, value: int) -> None:
    """Lower the soft limit ``what`` to ``value``, never above the hard one."""
    hard = resource.getrlimit(what)[1]
    resource.setrlimit(what, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))


def send(replies: int, message: dict[str, object]) -> None:
    data = json.dumps(message).encode() + b"\n"
    while data:
        data = data[os.write(replies, data) :]


def describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:1000]


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))
