"""What a plan is expected to do: the timeline of its steps and the memory of every worker."""

from dataclasses import dataclass

from realhf.api.layout import Layout
from realhf.api.program import Compute
from realhf.plan.cost.memory import Bytes
from realhf.plan.search.timeline import Timeline


@dataclass(frozen=True)
class Prediction:
    """What a plan is expected to do."""

    timeline: Timeline
    memory: dict[int, Bytes]

    @property
    def seconds(self) -> float:
        """Seconds of one step when the run has settled."""
        return self.timeline.seconds_per_step

    @property
    def call_seconds(self) -> dict[str, tuple[float, float]]:
        """Seconds of one settled step that every MFC computes, and that its weights and rows move."""
        last = max(a.step for a in self.timeline.activities)
        found: dict[str, tuple[float, float]] = {}
        for a in self.timeline.activities:
            if a.step == last:
                compute, moves = found.get(a.mfc, (0.0, 0.0))
                length = a.end - a.start
                found[a.mfc] = (
                    (compute + length, moves) if isinstance(a.instruction, Compute) else (compute, moves + length)
                )
        return found

    @property
    def critical_shares(self) -> dict[str, float]:
        """Share of the settled time that every MFC has on the critical path; what is left is the master's."""
        start, end = self.timeline.steady_state
        found: dict[str, float] = {}
        for number in self.timeline.critical_path:
            a = self.timeline.activities[number]
            inside = max(0.0, min(a.end, end) - max(a.start, start))
            found[a.mfc] = found.get(a.mfc, 0.0) + inside / (end - start)
        return found

    @property
    def peak(self) -> float:
        """Bytes of the fullest worker."""
        return max(some.total for some in self.memory.values())


@dataclass(frozen=True)
class Alternative:
    """Another layout of one call, and the seconds of a step with it."""

    layout: Layout
    seconds: float
