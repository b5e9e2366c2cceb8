"""Duration of a pipeline: a simulation of its stages' schedules."""

from collections.abc import Callable, Sequence
from functools import lru_cache

from realhf.plan.compile import pipeline

ChunkTime = Callable[[int, int], float]
"""Seconds of (chunk of layers of the model, micro-batch); stage s of pp has the chunks s, s + pp and so on."""
Schedule = Callable[[int, int, int, int], Sequence[pipeline.StageStep]]
"""Steps of (stage, number of stages, number of micro-batches, number of chunks per stage)."""


def makespan(
    schedules: Sequence[Sequence[pipeline.StageStep]], forward: ChunkTime, backward: ChunkTime, send: ChunkTime
) -> float:
    """Return the seconds until the last stage has finished.

    ``send`` is the transfer time of an activation or gradient to the adjacent chunk; the sender does not wait for it.
    AssertionError if the schedules deadlock.
    """
    clocks = [0.0] * len(schedules)
    positions = [0] * len(schedules)
    arrivals: dict[tuple[bool, int, int], float] = {}  # (gradient?, receiving chunk, micro-batch)

    def end_of(step: pipeline.StageStep, stage: int) -> float | None:
        """Return the end of the next step of a stage; None if it receives a message that has not been sent yet."""
        now, i, chunk = clocks[stage], step.micro_batch, step.chunk * len(schedules) + stage
        match step:
            case pipeline.Forward():
                return now + forward(chunk, i)
            case pipeline.Backward():
                return now + backward(chunk, i)
            case pipeline.SendActivation():
                arrivals[False, chunk + 1, i] = now + send(chunk, i)
                return now
            case pipeline.SendGradient():
                arrivals[True, chunk - 1, i] = now + send(chunk, i)
                return now
        arrival = arrivals.get((isinstance(step, pipeline.RecvGradient), chunk, i))
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
    schedule: Schedule, n: int, forward: tuple[float, ...], backward: tuple[float, ...], send: tuple[float, ...],
    n_chunks: int = 1,
) -> float:  # fmt: skip
    """Return the makespan of ``n`` equal micro-batches, given seconds per chunk; stages have ``n_chunks``.

    In a full pipeline every further group of micro-batches, one per stage, adds about the same time, so long pipelines
    are extrapolated. With nearly equal stages the pipeline fills slowly, and the result may be 2 % off (4 % with
    several chunks).
    """
    n_stages = len(forward) // n_chunks
    filled = 8 * n_stages + n % n_stages
    if n <= filled:
        steps = [schedule(stage, n_stages, n, n_chunks) for stage in range(n_stages)]
        return makespan(steps, lambda c, _: forward[c], lambda c, _: backward[c], lambda c, _: send[c])
    full, before = (uniform_makespan(schedule, m, forward, backward, send, n_chunks)
                    for m in (filled, filled - n_stages))  # fmt: skip
    return full + (n - filled) * (full - before) / n_stages
