"""Curves of any length in bounded memory: means, minima and maxima of runs of consecutive values."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

MAX_POINTS = 1000  # of a curve; even
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Curve:
    """Points of a curve. ``low`` and ``high`` are the extremes of the values that a point is the mean of."""

    steps: Floats
    means: Floats
    low: Floats
    high: Floats

    def __len__(self) -> int:
        return len(self.steps)

    @property
    def is_averaged(self) -> bool:
        return bool(np.any(self.low != self.high))


class Series:
    """A curve that grows. It has at most ``MAX_POINTS`` points, each the mean of ``size`` values."""

    def __init__(self) -> None:
        self.n, self.n_omitted = 0, 0  # finite values; NaN and infinite ones
        self.size = 1
        self.first = self.last = float("nan")
        self.minimum, self.maximum = float("inf"), float("-inf")
        self._pending = np.empty((2, 0))  # steps and values that do not make up a point yet
        self._points = np.empty((4, 0))  # steps, means, minima, maxima

    def extend(self, steps: Floats, values: Floats) -> None:
        """Append values in the order of their steps; NaN and infinite ones are omitted."""
        new = np.stack([steps, values])
        finite = np.isfinite(new[1])
        self.n_omitted += int((~finite).sum())
        new = new[:, finite]
        if not new.shape[1]:
            return
        if not self.n:
            self.first = float(new[1, 0])
        self.n, self.last = self.n + new.shape[1], float(new[1, -1])
        self.minimum, self.maximum = min(self.minimum, float(new[1].min())), max(self.maximum, float(new[1].max()))
        self._pending = np.concatenate([self._pending, new], axis=1)
        while (n_new := min(self._pending.shape[1] // self.size, MAX_POINTS - self._points.shape[1])) > 0:
            self._append_points(n_new * self.size)

    def _append_points(self, n_values: int) -> None:
        rows = self._pending[[0, 1, 1, 1], :n_values]
        self._pending = self._pending[:, n_values:]
        self._points = np.concatenate([self._points, _merged(rows, self.size)], axis=1)
        if self._points.shape[1] == MAX_POINTS:
            self._points, self.size = _merged(self._points, 2), 2 * self.size

    def curve(self, n_points: int = MAX_POINTS) -> Curve:
        """Return at most ``n_points`` points; the last one may be the mean of fewer values than the others."""
        points = self._points
        if n_rest := self._pending.shape[1]:
            points = np.concatenate([points, _merged(self._pending[[0, 1, 1, 1]], n_rest)], axis=1)
        if points.shape[1] > n_points:
            points = _merged(points, -(-points.shape[1] // n_points))
        return Curve(*points)


def _merged(points: Floats, size: int) -> Floats:
    """Merge runs of ``size`` points; the last run may be shorter. A merged point has the step of its last one."""
    n_points = points.shape[1]
    starts = np.arange(0, n_points, size)
    ends = np.minimum(starts + size, n_points)
    means = np.add.reduceat(points[1], starts) / (ends - starts)
    low, high = np.minimum.reduceat(points[2], starts), np.maximum.reduceat(points[3], starts)
    return np.stack([points[0, ends - 1], np.clip(means, low, high), low, high])
