"""Metrics that workers measure after every request, and that the master reduces to one number per step.

To add a metric, add an entry to ``WORKER_METRICS``.
"""

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING

from realhf.api.messages import Done
from realhf.base.host_memory import resident_bytes
from realhf.system.metrics.trace import SpanTuple

if TYPE_CHECKING:
    from realhf.system.executor import Executor


class Reduction(Enum):
    SUM = auto()
    MAX = auto()
    MAX_OF_SUMS = auto()  # the sum of every worker, then the largest of them: times of the slowest worker


@dataclass(frozen=True)
class WorkerMetric:
    """A metric of a step. Workers send the integer ``measure(spans, executor)``.

    ``name`` is the key in metrics.jsonl; with ``{mfc}`` there is one metric per MFC. ``unit`` divides the result.
    """

    name: str
    reduction: Reduction
    measure: Callable[[Sequence[SpanTuple], "Executor"], int]
    unit: float = 1.0


def microseconds(spans: Sequence[SpanTuple], *instructions: str) -> int:
    return sum(duration for name, _, duration in spans if name.partition("/")[2] in instructions)


WORKER_METRICS = (
    WorkerMetric("time/{mfc}_s", Reduction.MAX_OF_SUMS, lambda spans, _: microseconds(spans, "Compute"), 1e6),
    WorkerMetric(
        "time/move_s", Reduction.MAX_OF_SUMS, lambda spans, _: microseconds(spans, "Transfer", "Reallocate"), 1e6
    ),
    WorkerMetric("memory/worker_peak_gb", Reduction.MAX, lambda spans, executor: resident_bytes()[0], 1e9),
    WorkerMetric("memory/worker_gb", Reduction.MAX, lambda spans, executor: resident_bytes()[1], 1e9),
)
IS_MAX = tuple(metric.reduction is Reduction.MAX for metric in WORKER_METRICS)


def measure_worker(spans: Sequence[SpanTuple], executor: "Executor") -> tuple[int, ...]:
    """Return the metrics of one request in the order of ``WORKER_METRICS``."""
    return tuple(metric.measure(spans, executor) for metric in WORKER_METRICS)


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
        for values, is_max, value in zip(arrays, IS_MAX, reply.metrics, strict=False):
            if not is_max:
                values[rank] += value
            elif value > values[rank]:
                values[rank] = value

    def metrics(self) -> dict[str, float]:
        """Return the metrics that are not zero, in the order of ``WORKER_METRICS``."""
        reduced: dict[str, float] = {}
        for i, metric in enumerate(WORKER_METRICS):
            reduce = sum if metric.reduction is Reduction.SUM else max
            for mfc, arrays in self._by_mfc.items():
                if value := reduce(arrays[i]):
                    reduced[metric.name.replace("{mfc}", mfc)] = value / metric.unit
        return reduced

    def _array(self) -> "array[int]":
        return array("q", self._zeros)
