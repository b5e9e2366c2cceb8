"""Duration of a pipeline: a simulation of its stages' schedules."""

from collections.abc import Callable, Sequence
from functools import lru_cache

from realhf.plan.compile import pipeline

StageTime = Callable[[int, int], float]  # seconds of (stage, micro-batch)
Schedule = Callable[[int, int, int], Sequence[pipeline.StageStep]]
"""Steps of (stage, number of stages, number of micro-batches)."""


def makespan(
    schedules: Sequence[Sequence[pipeline.StageStep]], forward: StageTime, backward: StageTime, send: StageTime
) -> float:
    """Return the seconds until the last stage has finished.

    ``send`` is the transfer time of an activation or gradient to the adjacent stage; the sender does not wait for it.
    AssertionError if the schedules deadlock.
    """
    clocks = [0.0] * len(schedules)
    positions = [0] * len(schedules)
    arrivals: dict[tuple[bool, int, int], float] = {}  # (gradient?, receiving stage, micro-batch)

    def end_of(step: pipeline.StageStep, stage: int) -> float | None:
        """Return the end of the next step of a stage; None if it receives a message that has not been sent yet."""
        now, i = clocks[stage], step.micro_batch
        match step:
            case pipeline.Forward():
                return now + forward(stage, i)
            case pipeline.Backward():
                return now + backward(stage, i)
            case pipeline.SendActivation():
                arrivals[False, stage + 1, i] = now + send(stage, i)
                return now
            case pipeline.SendGradient():
                arrivals[True, stage - 1, i] = now + send(stage, i)
                return now
        arrival = arrivals.get((isinstance(step, pipeline.RecvGradient), stage, i))
        return None if arrival is None else max(now, arrival)

    progressed = True
    while progressed:
        progressed = False
        for stage, steps in enumerate(schedules):
            while positions[stage] < len(steps) and (end := end_of(steps[positions[stage]], stage)) is not None:
                clocks[stage], progressed = end, True
                positions[stage] += 1
    assert all(i == len(steps) for i, steps in zip(positions, schedules, strict=True)), "the schedules deadlock"
    return max(clocks)


@lru_cache(maxsize=4096)
def uniform_makespan(
    schedule: Schedule, n: int, forward: tuple[float, ...], backward: tuple[float, ...], send: tuple[float, ...]
) -> float:
    """Return the makespan of ``n`` equal micro-batches, given seconds per stage.

    In a full pipeline every further micro-batch adds about the same time, so long pipelines are extrapolated. With
    nearly equal stages the pipeline fills slowly, and the result may be 2 % off.
    """
    n_stages = len(forward)
    filled = 8 * n_stages
    if n <= filled:
        steps = [schedule(stage, n_stages, n) for stage in range(n_stages)]
        return makespan(steps, lambda s, _: forward[s], lambda s, _: backward[s], lambda s, _: send[s])
    full, before = (uniform_makespan(schedule, m, forward, backward, send) for m in (filled, filled - n_stages))
    return full + (n - filled) * (full - before) / n_stages
