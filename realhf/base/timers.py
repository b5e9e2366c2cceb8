"""Named wall-clock intervals, comparable between processes."""

import heapq
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from realhf.base.activity import ActivityStack


class Spans:
    """Collects ``(name, start_us, duration_us)``; open spans are also entered into ``activity``."""

    def __init__(self, activity: ActivityStack | None = None) -> None:
        self._spans: list[tuple[str, int, int]] = []
        self._concurrent: list[tuple[str, int, int]] = []
        self._activity = activity or ActivityStack()

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        start = time.time_ns()
        try:
            with self._activity.enter(name):
                yield
        finally:
            self._spans.append((name, start // 1000, (time.time_ns() - start) // 1000))

    def add_concurrent(self, name: str, start_us: int, duration_us: int) -> None:
        """Add an interval of another process, which may overlap others."""
        self._concurrent.append((name, start_us, duration_us))

    def take_concurrent(self) -> list[tuple[str, int, int]]:
        spans, self._concurrent = self._concurrent, []
        return spans

    def take(self) -> list[tuple[str, int, int]]:
        spans, self._spans = self._spans, []
        return spans


def lanes_of(spans: Sequence[tuple[str, int, int]]) -> list[int]:
    """Return a lane for each span, from 0, so that those of a lane do not overlap; few lanes are used."""
    free, busy, lanes, n = list[int](), list[tuple[int, int]](), [0] * len(spans), 0
    for i in sorted(range(len(spans)), key=lambda i: spans[i][1]):
        _, start, duration = spans[i]
        while busy and busy[0][0] <= start:
            heapq.heappush(free, heapq.heappop(busy)[1])
        if free:
            lanes[i] = heapq.heappop(free)
        else:
            lanes[i], n = n, n + 1
        heapq.heappush(busy, (start + duration, lanes[i]))
    return lanes
