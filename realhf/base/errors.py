"""Exceptions that are reported to the user without a traceback."""

import contextlib
import difflib
from collections.abc import Iterable, Iterator
from pathlib import Path


class UserError(Exception):
    """One or more problems with the user's input, shown as a numbered list."""

    def __init__(self, problems: str | Iterable[str]) -> None:
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        super().__init__("\n".join(self.problems))


class InfeasibleError(UserError):
    """A valid request that cannot be satisfied: an invalid graph, or a plan that does not fit."""


class RunFailed(Exception):
    """A launched run failed: a worker died, raised an error, or missed a deadline.

    ``lost`` are the workers without a heartbeat; ``n_nodes`` is the number of nodes that the launcher has left
    (None: unknown).
    """

    def __init__(
        self, message: str, traceback_text: str = "", lost: Iterable[int] = (), n_nodes: int | None = None
    ) -> None:
        super().__init__(message)
        self.traceback_text, self.lost, self.n_nodes = traceback_text, tuple(lost), n_nodes


class WorkerTimeout(RunFailed):
    """The workers ``ranks`` did not respond in time."""

    def __init__(self, message: str, ranks: Iterable[int], lost: Iterable[int] = ()) -> None:
        super().__init__(message, lost=lost)
        self.ranks = tuple(ranks)


class RunStopped(Exception):
    """A run ended early, after a complete step, on request."""


@contextlib.contextmanager
def damage_reported(path: Path, advice: str) -> Iterator[None]:
    """Report every error of reading a file that the program has written as a one-line ``UserError``."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # of the file system, of decoding, and of the values
        problem = " ".join(f"{type(error).__name__}: {error}".split())
        raise UserError(f"{path} is damaged ({problem:.200}); {advice}") from error


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return ``"  did you mean X ?"`` for the closest known word, or an empty string if none is close."""
    known = list(known)
    matches = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    if not matches:
        last_parts = {k.rsplit(".", 1)[-1]: k for k in known}
        close = difflib.get_close_matches(word.rsplit(".", 1)[-1], list(last_parts), n=1, cutoff=0.7)
        matches = [last_parts[part] for part in close]
    return f"  did you mean {matches[0]} ?" if matches else ""


def kind_of(value: object) -> str:
    """Return a description of a JSON value for a message."""
    if value == []:
        return "an empty list"
    kinds = {type(None): "null", list: "a list", dict: "an object", str: "a text"}
    return kinds.get(type(value)) or f"{value!r:.40}"
