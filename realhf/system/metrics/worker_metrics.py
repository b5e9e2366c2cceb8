"""Metrics that workers measure after every request, and that the master reduces to one number per step.

To add a metric, add an entry to ``WORKER_METRICS``.
"""

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from realhf.api.messages import Done
from realhf.base.host_memory import resident_bytes
from realhf.system.metrics.trace import SpanTuple


@dataclass(frozen=True)
class WorkerMetric:
    """The largest value of any worker in a step: the sum of its ``measure(spans)`` if ``is_sum``, else their maximum.

    ``name`` is the key in metrics.jsonl; with ``{mfc}`` there is one metric per MFC. ``unit`` divides the result.
    """

    name: str
    measure: Callable[[Sequence[SpanTuple]], int]
    is_sum: bool
    unit: float


def microseconds(spans: Sequence[SpanTuple], *instructions: str) -> int:
    return sum(duration for name, _, duration in spans if name.partition("/")[2] in instructions)


WORKER_METRICS = (
    WorkerMetric("time/{mfc}_s", lambda spans: microseconds(spans, "Compute"), is_sum=True, unit=1e6),
    WorkerMetric("time/move_s", lambda spans: microseconds(spans, "Transfer", "Reallocate"), is_sum=True, unit=1e6),
    WorkerMetric("memory/worker_peak_gb", lambda spans: resident_bytes()[0], is_sum=False, unit=1e9),
    WorkerMetric("memory/worker_gb", lambda spans: resident_bytes()[1], is_sum=False, unit=1e9),
)
IS_SUM = tuple(metric.is_sum for metric in WORKER_METRICS)  # read for every reply


class StepMetrics:
    """Accumulates the worker metrics of one step. ``add`` is fast: the master receives thousands of replies."""

    def __init__(self, n_workers: int) -> None:
        self._zeros = bytes(8 * n_workers)
        self._shared = [self._array() for _ in WORKER_METRICS]
        self._by_mfc: dict[str, list[array[int]]] = {}  # for each metric: values by rank

    def add(self, mfc: str, reply: Done) -> None:
        if (arrays := self._by_mfc.get(mfc)) is None:
            arrays = self._by_mfc[mfc] = [
                self._array() if "{mfc}" in metric.name else shared
                for metric, shared in zip(WORKER_METRICS, self._shared, strict=True)
            ]
        rank = reply.rank
        for values, is_sum, value in zip(arrays, IS_SUM, reply.metrics, strict=False):
            if is_sum:
                values[rank] += value
            elif value > values[rank]:
                values[rank] = value

    def metrics(self) -> dict[str, float]:
        """Return the metrics that are not zero, in the order of ``WORKER_METRICS``."""
        reduced: dict[str, float] = {}
        for i, metric in enumerate(WORKER_METRICS):
            for mfc, arrays in self._by_mfc.items():
                if value := max(arrays[i]):
                    reduced[metric.name.replace("{mfc}", mfc)] = value / metric.unit
        return reduced

    def shares(self, seconds: float) -> dict[str, float]:
        """Return the fraction of all workers' time that each call takes, and the transfers: ``time/move_share``.

        The shares add up to at most 1, because a worker executes one instruction at a time. With generation ahead of
        training, a step may contain more work than its ``seconds``.
        """
        totals: dict[str, int] = {}
        for i, metric in enumerate(WORKER_METRICS):
            if metric.name.startswith("time/"):
                share = metric.name.removesuffix("_s") + "_share"
                totals |= {share.replace("{mfc}", mfc): sum(arrays[i]) for mfc, arrays in self._by_mfc.items()}
        whole = max(seconds * 1e6 * len(self._zeros) / 8, sum(totals.values()))
        return {name: total / whole for name, total in totals.items() if total}

    def _array(self) -> "array[int]":
        return array("q", self._zeros)
