"""The prediction of a plan: the timeline of its steps and the memory of each worker."""

from dataclasses import dataclass

from realhf.api.layout import Layout
from realhf.api.program import Compute
from realhf.plan.cost.memory import Bytes
from realhf.plan.search.timeline import Timeline


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
                if isinstance(a.instruction, Compute):
                    compute += a.end - a.start
                else:
                    transfer += a.end - a.start
                seconds[a.mfc] = compute, transfer
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
    """Another layout of one call, and the seconds of a step with it."""

    layout: Layout
    seconds: float
