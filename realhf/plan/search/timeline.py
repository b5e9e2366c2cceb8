"""The prediction of a plan: the timeline of a simulated run and the memory of each worker."""

from dataclasses import dataclass
from functools import cached_property

from realhf.api.execution_plan import Placement
from realhf.api.layout import Layout
from realhf.api.program import Compute, Instruction
from realhf.plan.cost.memory import Bytes


@dataclass(frozen=True)
class Activity:
    """One instruction of one call on ``ranks``, from ``start`` to ``end`` in seconds.

    ``after`` is the index of the activity whose end let it start: the previous one on a worker, or the last one of the
    call that made the master dispatch this call; None at the start of the run.
    """

    mfc: str
    step: int
    instruction: Instruction
    ranks: tuple[int, ...]
    start: float
    end: float
    after: int | None


def steady_steps(n_steps: int, max_staleness: int) -> tuple[int, int]:
    """Return the steps at whose ends the steady state begins and ends; equal if only one step is simulated.

    Rollouts of the steps up to ``max_staleness`` may precede the end of step 0, so the steps after it are shorter. For
    the last ``max_staleness`` steps there are no further rollouts. Short runs have no such steps left.
    """
    last = max(n_steps - 1 - max_staleness, min(n_steps - 1, 1))
    return max(0, min(max_staleness, last - 1)), last


def n_steady_steps(n_steps: int, max_staleness: int) -> int:
    """Return the number of steps in the steady state."""
    first, last = steady_steps(n_steps, max_staleness)
    return last - first


@dataclass(frozen=True)
class Timeline:
    """A simulated run. ``step_ends[s]`` is when the master learns that step ``s`` has finished.

    The last ``max_staleness`` steps overlap with fewer calls, since there are no further steps to generate for.
    """

    n_workers: int
    activities: tuple[Activity, ...]
    step_ends: tuple[float, ...]
    max_staleness: int = 0

    @property
    def seconds_per_step(self) -> float:
        """Mean seconds per step in the steady state."""
        start, end = self.steady_state
        return (end - start) / max(1, n_steady_steps(len(self.step_ends), self.max_staleness))

    @property
    def steady_state(self) -> tuple[float, float]:
        """Start and end of the steady state, or of the only step."""
        first, last = steady_steps(len(self.step_ends), self.max_staleness)
        return (self.step_ends[first] if last else 0.0), self.step_ends[last]

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """Fraction of the steady state that each worker spends in activities."""
        start, end = self.steady_state
        seconds = [0.0] * self.n_workers
        for activity in self.activities:
            for rank in activity.ranks:
                seconds[rank] += max(0.0, min(end, activity.end) - max(start, activity.start))
        return tuple(s / (end - start) if end > start else 0.0 for s in seconds)

    @property
    def idle(self) -> float:
        """Mean fraction of the steady state that workers are idle."""
        return 1.0 - sum(self.busy) / self.n_workers

    @cached_property
    def critical_path(self) -> tuple[int, ...]:
        """Indices of the activities that determine the total time; each starts when the previous one ends."""
        path: list[int] = []
        number = max(range(len(self.activities)), key=lambda i: self.activities[i].end, default=None)
        while number is not None:
            path.append(number)
            number = self.activities[number].after
        return tuple(reversed(path))


@dataclass(frozen=True)
class Prediction:
    timeline: Timeline
    memory: dict[int, Bytes]

    @property
    def seconds(self) -> float:
        return self.timeline.seconds_per_step

    @property
    def call_seconds(self) -> dict[str, tuple[float, float]]:
        """Compute and transfer seconds of every MFC in the last step."""
        last = max(a.step for a in self.timeline.activities)
        seconds: dict[str, tuple[float, float]] = {}
        for a in self.timeline.activities:
            if a.step == last:
                compute, transfer = seconds.get(a.mfc, (0.0, 0.0))
                spent, computes = a.end - a.start, isinstance(a.instruction, Compute)
                seconds[a.mfc] = (compute + spent, transfer) if computes else (compute, transfer + spent)
        return seconds

    @property
    def critical_shares(self) -> dict[str, float]:
        """Fraction of the steady state that every MFC is on the critical path; the rest is latency of the master."""
        start, end = self.timeline.steady_state
        shares: dict[str, float] = {}
        for number in self.timeline.critical_path:
            a = self.timeline.activities[number]
            inside = max(0.0, min(a.end, end) - max(a.start, start))
            shares[a.mfc] = shares.get(a.mfc, 0.0) + inside / (end - start)
        return shares

    @property
    def peak(self) -> float:
        """Peak bytes over all workers."""
        return max(some.total for some in self.memory.values())


@dataclass(frozen=True)
class Alternative:
    """Another placement of one call, and the seconds of a step with it."""

    placement: Placement
    seconds: float

    @property
    def layout(self) -> Layout:
        return self.placement.layout
