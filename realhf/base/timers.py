"""Spans: named intervals on the wall clock, kept until somebody takes them. Wall clock, so that processes compare."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from realhf.base.activity import ActivityStack


class Spans:
    """Collects ``(name, start_us, duration_us)`` of what one process did; while it does it, it is on ``activity``."""

    def __init__(self, activity: ActivityStack | None = None) -> None:
        self._spans: list[tuple[str, int, int]] = []
        self._activity = activity or ActivityStack()

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        start = time.time_ns()
        try:
            with self._activity.enter(name):
                yield
        finally:
            self._spans.append((name, start // 1000, (time.time_ns() - start) // 1000))

    def take(self) -> list[tuple[str, int, int]]:
        """Return the spans so far and forget them."""
        spans, self._spans = self._spans, []
        return spans
