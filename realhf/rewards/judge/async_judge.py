"""Keeps many answers in flight in one judge process, for reward functions that are ``async def``."""

import time
from collections.abc import Iterator

from realhf.rewards.judge.process import JudgeProcess, ProcessExited, verdict_of
from realhf.rewards.verdict import Verdict

GRACE = 1.0
"""Seconds beyond an answer's own deadline, which the process keeps itself, until its event loop counts as stuck."""


def judge_all(
    child: JudgeProcess, requests: Iterator[tuple[int, dict]], max_concurrency: int
) -> Iterator[tuple[int, Verdict]]:
    """Yield the verdict on every numbered request, as they come.

    An ordinary function is asked one at a time. An asynchronous one has ``max_concurrency`` of them; when its process dies or
    its event loop is stuck, those in flight are judged again, one at a time, so that only the culprit fails.
    """
    child.await_ready()
    if not child.is_asynchronous:
        yield from ((i, child.judge(request)) for i, request in requests)
        return
    flying: dict[int, tuple[dict, float]] = {}
    while True:
        try:
            while len(flying) < max_concurrency and (new := next(requests, None)) is not None:
                i, request = new
                deadline = time.monotonic() + child.timeout + GRACE
                flying[i] = request, deadline
                child.send({**request, "id": i}, deadline)
            if not flying:
                return
            reply = child.receive(min(deadline for _, deadline in flying.values()))
        except (TimeoutError, ProcessExited):
            child.kill()
            for i, (request, _) in flying.items():
                yield i, child.judge(request)
            flying.clear()
        else:
            i = reply["id"]
            del flying[i]
            yield i, verdict_of(reply, child.timeout)
