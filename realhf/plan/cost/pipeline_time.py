"""How long a pipeline takes: its stages' very schedules, run against a clock."""

from collections.abc import Callable, Sequence
from functools import lru_cache

from realhf.plan.compile.pipeline import (
    Backward,
    Forward,
    RecvActivation,
    RecvGradient,
    SendActivation,
    SendGradient,
    StageStep,
)

StageTime = Callable[[int, int], float]
"""Seconds of (stage, micro-batch)."""


def makespan(
    schedules: Sequence[Sequence[StageStep]], forward: StageTime, backward: StageTime, send: StageTime
) -> float:
    """Return the seconds until the last stage to finish has finished.

    ``send`` is how long a micro-batch's activation (or its gradient) is on its way from a stage to a neighbour; the
    sender goes on at once. AssertionError when the schedules wait for each other for ever.
    """
    clocks = [0.0] * len(schedules)
    places = [0] * len(schedules)
    arrivals: dict[tuple[bool, int, int], float] = {}  # (gradient?, receiving stage, micro-batch)
    moved = True
    while moved:
        moved = False
        for stage, steps in enumerate(schedules):
            while places[stage] < len(steps):
                at = _after(steps[places[stage]], stage, clocks[stage], arrivals, forward, backward, send)
                if at is None:
                    break
                clocks[stage], moved = at, True
                places[stage] += 1
    assert all(place == len(steps) for place, steps in zip(places, schedules, strict=True)), "stages wait for ever"
    return max(clocks)


@lru_cache(maxsize=4096)
def uniform_makespan(
    schedule: Callable[[int, int, int], Sequence[StageStep]],
    n: int,
    forward: tuple[float, ...],
    backward: tuple[float, ...],
    send: tuple[float, ...],
) -> float:
    """Return the makespan of ``n`` equal micro-batches, given seconds by stage and ``schedule(stage, n_stages, n)``.

    Once a long pipeline is full every further micro-batch adds about the same, so that it need not be run to its end;
    where stages are nearly alike it fills slowly, and the result may be 2 % off.
    """
    n_stages = len(forward)
    filled = 8 * n_stages
    if n <= filled:
        steps = [schedule(stage, n_stages, n) for stage in range(n_stages)]
        return makespan(steps, lambda s, _: forward[s], lambda s, _: backward[s], lambda s, _: send[s])
    full, before = (uniform_makespan(schedule, m, forward, backward, send) for m in (filled, filled - n_stages))
    return full + (n - filled) * (full - before) / n_stages


def _after(
    step: StageStep,
    stage: int,
    now: float,
    arrivals: dict[tuple[bool, int, int], float],
    forward: StageTime,
    backward: StageTime,
    send: StageTime,
) -> float | None:
    """Return when a stage is done with a step that it turns to ``now``; None while what it waits for is not sent."""
    match step:
        case Forward(i):
            return now + forward(stage, i)
        case Backward(i):
            return now + backward(stage, i)
        case SendActivation(i):
            arrivals[False, stage + 1, i] = now + send(stage, i)
            return now
        case SendGradient(i):
            arrivals[True, stage - 1, i] = now + send(stage, i)
            return now
        case RecvActivation(i):
            arrival = arrivals.get((False, stage, i))
        case RecvGradient(i):
            arrival = arrivals.get((True, stage, i))
    return None if arrival is None else max(now, arrival)
