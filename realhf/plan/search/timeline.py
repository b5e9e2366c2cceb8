"""What a simulated run looks like: who does what when, how long a step takes, and what that hangs on."""

from dataclasses import dataclass
from functools import cached_property

from realhf.api.program import Instruction


@dataclass(frozen=True)
class Activity:
    """One instruction of one call on ``ranks``, from ``start`` to ``end`` in seconds.

    ``after`` is the number of the activity whose end let it start: the one before on a worker, or the last of the call
    that the master answered with this one; None at the start of the run.
    """

    mfc: str
    step: int
    instruction: Instruction
    ranks: tuple[int, ...]
    start: float
    end: float
    after: int | None


def n_steady_steps(n_steps: int, max_staleness: int) -> int:
    """Return how many steps are alike: all but the first and the last ``max_staleness``, or one of several."""
    return max(n_steps - 1 - max_staleness, min(n_steps - 1, 1))


@dataclass(frozen=True)
class Timeline:
    """A simulated run. ``step_ends[s]`` is when the master knows that step ``s`` is over.

    ``max_staleness`` of the last steps have fewer calls to overlap with: nothing is left to do ahead.
    """

    n_workers: int
    activities: tuple[Activity, ...]
    step_ends: tuple[float, ...]
    max_staleness: int = 0

    @property
    def seconds_per_step(self) -> float:
        """Seconds of a step when the run has settled: the mean over the steps that ``settled`` spans."""
        start, end = self.steady_state
        return (end - start) / max(1, n_steady_steps(len(self.step_ends), self.max_staleness))

    @property
    def steady_state(self) -> tuple[float, float]:
        """From when to when the run has settled: from the end of the first step, where there are more."""
        last = n_steady_steps(len(self.step_ends), self.max_staleness)
        return (self.step_ends[0] if last else 0.0), self.step_ends[last]

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """Share of the settled steps that each worker spends in activities."""
        start, end = self.steady_state
        seconds = [0.0] * self.n_workers
        for activity in self.activities:
            for rank in activity.ranks:
                seconds[rank] += max(0.0, min(end, activity.end) - max(start, activity.start))
        return tuple(s / (end - start) if end > start else 0.0 for s in seconds)

    @property
    def idle(self) -> float:
        """Share of the settled steps that the workers spend waiting, on average."""
        return 1.0 - sum(self.busy) / self.n_workers

    @cached_property
    def critical_path(self) -> tuple[int, ...]:
        """Numbers of the activities that determine the end, in order: each starts when the one before it ends."""
        path: list[int] = []
        number = max(range(len(self.activities)), key=lambda i: self.activities[i].end, default=None)
        while number is not None:
            path.append(number)
            number = self.activities[number].after
        return tuple(reversed(path))
