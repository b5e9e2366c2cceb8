"""The few exceptions that reach a user: what went wrong, where, and what to do about it."""

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """One or more problems that the user can mend; shown as a numbered list without a traceback."""

    def __init__(self, problems: str | Iterable[str]) -> None:
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        super().__init__("\n".join(self.problems))


class Impossible(UserError):
    """What was asked for is understood, and cannot be done: a graph that is none, a plan that does not fit."""


class RunFailed(Exception):
    """A launched run ended without doing the requested work: a worker died, raised, or missed a deadline."""

    def __init__(self, message: str, traceback_text: str = "") -> None:
        super().__init__(message)
        self.traceback_text = traceback_text


class Hung(RunFailed):
    """A run whose workers ``ranks`` did not answer in time; their launcher may know more."""

    def __init__(self, message: str, ranks: Iterable[int]) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return ``"  did you mean X ?"`` for the nearest known word, or an empty string where none is near."""
    known = list(known)
    near = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    if not near:
        tails = {k.rsplit(".", 1)[-1]: k for k in known}
        tail = difflib.get_close_matches(word.rsplit(".", 1)[-1], list(tails), n=1, cutoff=0.7)
        near = [tails[t] for t in tail]
    return f"  did you mean {near[0]} ?" if near else ""
