"""The few exceptions that reach a user: what went wrong, where, and what to do about it."""

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """One or more problems that the user can mend; shown as a numbered list without a traceback."""

    def __init__(self, problems: str | Iterable[str]) -> None:
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        super().__init__("\n".join(self.problems))


class InfeasibleError(UserError):
    """What was asked for is understood, and cannot be done: a graph that is none, a plan that does not fit."""


class RunFailed(Exception):
    """A launched run ended without doing the requested work: a worker died, raised, or missed a deadline.

    ``lost`` are the workers that gave no more sign of life, ``n_nodes`` is how many nodes their launcher has left for
    the run (None: it was not asked).
    """

    def __init__(
        self, message: str, traceback_text: str = "", lost: Iterable[int] = (), n_nodes: int | None = None
    ) -> None:
        super().__init__(message)
        self.traceback_text, self.lost, self.n_nodes = traceback_text, tuple(lost), n_nodes


class WorkerTimeout(RunFailed):
    """A run whose workers ``ranks`` did not answer in time; their launcher may know more."""

    def __init__(self, message: str, ranks: Iterable[int], lost: Iterable[int] = ()) -> None:
        super().__init__(message, lost=lost)
        self.ranks = tuple(ranks)


class RunStopped(Exception):
    """A run that ended after a step, before its last one, because somebody asked it to."""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return ``"  did you mean X ?"`` for the nearest known word, or an empty string where none is near."""
    known = list(known)
    near = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    if not near:
        tails = {k.rsplit(".", 1)[-1]: k for k in known}
        tail = difflib.get_close_matches(word.rsplit(".", 1)[-1], list(tails), n=1, cutoff=0.7)
        near = [tails[t] for t in tail]
    return f"  did you mean {near[0]} ?" if near else ""
