"""What a process is at, in words, for whoever asks while it does not answer."""

from collections.abc import Iterator
from contextlib import contextmanager


class ActivityStack:
    """Nested things under way, the outermost first. One thread enters and leaves them, any may read them.

    What is entered is turned into words only when somebody reads, so it must not change in ways that break this.
    """

    def __init__(self) -> None:
        self._under_way: list[object] = []

    @contextmanager
    def enter(self, what: object) -> Iterator[None]:
        self._under_way.append(what)
        try:
            yield
        finally:
            self._under_way.pop()

    def __str__(self) -> str:
        return ", ".join(str(what) for what in tuple(self._under_way))
