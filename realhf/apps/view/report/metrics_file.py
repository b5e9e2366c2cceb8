"""Metrics of a run, read from a file that grows: curves, the last step, and warnings."""

import json
import sys
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import isfinite
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from realhf.apps.view.report.series import Floats, Series
from realhf.apps.view.step_warnings import is_watched, step_warnings

MAX_LINE = 16 << 20  # bytes
MAX_METRICS = 1000  # names of a run
MAX_STEP = 2**53
CHUNK = 2048  # steps that are added to the curves at a time
NUMBERS = (float, int)  # without bool
N_EARLIER = 20  # steps with which a step is compared, as on the console
Metrics = dict[str, float]
FileIdentity = tuple[int, int, int]  # inode, size and time of the last change


def file_identity(path: Path) -> FileIdentity | None:
    """Return what changes when a file is changed or replaced; None if there is none."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns


class GrowingFile:
    """The complete lines of a file that another process appends to."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.n_long = 0  # lines that are longer than MAX_LINE
        self._offset, self._inode = 0, 0

    def is_replaced(self) -> bool:
        """Return True if lines that have been read are gone; the next lines are then those from the start."""
        try:
            status = self.path.stat()
        except OSError:
            return False
        is_replaced = self._inode not in (0, status.st_ino) or status.st_size < self._offset
        if is_replaced:
            self._offset = self.n_long = 0
        self._inode = status.st_ino
        return is_replaced

    def lines(self) -> Iterator[bytes]:
        """Yield the complete lines after those of the last call."""
        if not self.path.is_file():
            return
        with self.path.open("rb") as file:
            file.seek(self._offset)
            is_long = False
            while line := file.readline(MAX_LINE):
                if line.endswith(b"\n"):
                    self._offset = file.tell()
                    self.n_long += is_long
                    if not is_long:
                        yield line
                    is_long = False
                elif len(line) == MAX_LINE:
                    is_long = True


@dataclass
class WarningSpan:
    """A warning of the run: its text at the last step that has it, and how many steps have it."""

    text: str
    first: int
    last: int
    n_steps: int = 1


def read_object(line: bytes) -> dict[str, Any] | None:
    """Return the JSON object in a line, also with NaN and infinite numbers; None if it is another value or damaged."""
    try:
        value = msgspec.json.decode(line)
    except (ValueError, RecursionError):
        value = _lenient(line)
    return value if isinstance(value, dict) else None


def _lenient(line: bytes) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


class Batches:
    """Steps that are not in the curves yet, grouped by their metrics."""

    def __init__(self) -> None:
        self._rows: dict[tuple[str, ...], list[list[float]]] = {}  # each is a step and its values

    def add(self, step: float, metrics: Metrics) -> None:
        self._rows.setdefault(tuple(metrics), []).append([step, *metrics.values()])

    def take(self) -> dict[str, tuple[Floats, Floats]]:
        """Remove and return steps and values of every metric, in order of the steps."""
        parts: dict[str, list[Floats]] = {}
        for names, rows in self._rows.items():
            columns = np.array(rows, dtype=np.float64).T
            for name, column in zip(names, columns[1:], strict=True):
                parts.setdefault(name, []).append(np.stack([columns[0], column]))
        self._rows.clear()
        taken = {}
        for name, found in parts.items():
            steps, values = np.concatenate(found, axis=1)
            order = np.argsort(steps, kind="stable") if len(found) > 1 else slice(None)
            taken[name] = (steps[order], values[order])
        return taken


class MetricsFile:
    """The content of ``metrics.jsonl`` so far."""

    def __init__(self, path: Path, max_logprob_diff: float = 0.0) -> None:
        self.path, self.max_logprob_diff = path, max_logprob_diff
        self.file = GrowingFile(path)
        self._reset()

    def _reset(self) -> None:
        self.series: dict[str, Series] = {}
        self.last: Metrics = {}
        self.n_steps = self.n_damaged = 0
        self.omitted_names: set[str] = set()
        self.warnings: dict[str, WarningSpan] = {}
        self._earlier: deque[Metrics] = deque(maxlen=N_EARLIER)
        self._new = Batches()

    def update(self) -> bool:
        """Read new lines; return True if there are any, or if earlier lines are gone."""
        changed = self.file.is_replaced()
        if changed:
            self._reset()
        for n, line in enumerate(self.file.lines(), 1):
            changed = True
            self._add(read_object(line))
            if n % CHUNK == 0:
                self._flush()
        self._flush()
        return changed

    def _add(self, record: dict[str, Any] | None) -> None:
        step = record.pop("step", None) if record else None
        if record is None or type(step) is not int or not self.n_steps <= step < MAX_STEP:
            self.n_damaged += 1
            return
        metrics = {name: value for name, value in record.items() if type(value) in NUMBERS}
        try:
            is_finite = isfinite(sum(metrics.values()))
        except OverflowError:  # an integer beyond the range of a float
            metrics = {name: float(value) for name, value in metrics.items() if abs(value) < sys.float_info.max}
            is_finite = False
        self._warn(step, {name: metrics[name] for name in _watched(tuple(metrics))} if is_finite else metrics)
        self._new.add(step, metrics)
        self.last, self.n_steps = metrics, step

    def _warn(self, step: int, metrics: Metrics) -> None:
        for kind, text in step_warnings(metrics, self.max_logprob_diff, self._earlier).items():
            if found := self.warnings.get(kind):
                found.text, found.last, found.n_steps = text, step, found.n_steps + 1
            elif len(self.warnings) < MAX_METRICS:
                self.warnings[kind] = WarningSpan(text, step, step)
        self._earlier.append(metrics)

    def _flush(self) -> None:
        for name, (steps, values) in self._new.take().items():
            if name in self.series or len(self.series) < MAX_METRICS:
                self.series.setdefault(name, Series()).extend(steps, values)
            elif len(self.omitted_names) < MAX_METRICS:
                self.omitted_names.add(name)

    def value(self, name: str) -> float | None:
        """Return the last value of a metric, or None."""
        series = self.series.get(name)
        return series.last if series and series.n else None

    def maximum(self, name: str) -> float | None:
        series = self.series.get(name)
        return series.maximum if series and series.n else None

    def typical(self, name: str) -> float | None:
        """Return the median of a metric over all steps but the first, or None."""
        series = self.series.get(name)
        means = series.curve().means if series and series.n else ()
        return float(np.median(means[1:] if len(means) > 1 else means)) if len(means) else None


@lru_cache(maxsize=64)
def _watched(names: tuple[str, ...]) -> tuple[str, ...]:
    """Return the metrics of a step that ``step_warnings`` reads if all are finite."""
    return tuple(name for name in names if is_watched(name))
