"""The current activities of a process, for reports about a process that does not respond."""

from collections.abc import Iterator
from contextlib import contextmanager


class ActivityStack:
    """Nested activities, outermost first. One thread enters and leaves them; any thread may read them.

    Activities are formatted only when read, so they must stay printable while they are on the stack.
    """

    def __init__(self) -> None:
        self._stack: list[object] = []

    @contextmanager
    def enter(self, activity: object) -> Iterator[None]:
        self._stack.append(activity)
        try:
            yield
        finally:
            self._stack.pop()

    def __str__(self) -> str:
        return ", ".join(str(activity) for activity in tuple(self._stack))
