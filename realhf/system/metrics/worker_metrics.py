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
    """A metric of a step. Workers send the integer ``measure(spans, executor)``, and omit zeros.

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
PER_MFC = frozenset(metric.name for metric in WORKER_METRICS if "{mfc}" in metric.name)
MAXIMA = frozenset(metric.name for metric in WORKER_METRICS if metric.reduction is Reduction.MAX)


def measure_worker(spans: Sequence[SpanTuple], executor: "Executor") -> dict[str, int]:
    """Return the non-zero metrics of one request."""
    values = {metric.name: metric.measure(spans, executor) for metric in WORKER_METRICS}
    return {name: value for name, value in values.items() if value}


class StepMetrics:
    """Accumulates the worker metrics of one step."""

    def __init__(self, n_workers: int) -> None:
        self._empty = bytes(8 * n_workers)
        self._values: dict[tuple[str, str], array[int]] = {}  # by metric and MFC: values by rank
        self._by_mfc: dict[str, dict[str, array[int]]] = {}  # the same arrays; the master adds thousands of replies

    def add(self, mfc: str, reply: Done) -> None:
        if (arrays := self._by_mfc.get(mfc)) is None:
            arrays = self._by_mfc[mfc] = {}
        rank = reply.rank
        for name, value in reply.metrics.items():
            if (values := arrays.get(name)) is None:
                key = name, mfc if name in PER_MFC else ""
                values = arrays[name] = self._values.setdefault(key, array("q", self._empty))
            if name not in MAXIMA:
                values[rank] += value
            elif value > values[rank]:
                values[rank] = value

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the step in the order of ``WORKER_METRICS``."""
        reduced: dict[str, float] = {}
        for metric in WORKER_METRICS:
            reduce = sum if metric.reduction is Reduction.SUM else max
            for (name, mfc), values in self._values.items():
                if name == metric.name:
                    reduced[name.replace("{mfc}", mfc)] = reduce(values) / metric.unit
        return reduced
