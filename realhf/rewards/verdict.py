"""What a judge says of one answer; a judge that failed is told apart from a wrong answer."""

from dataclasses import dataclass
from enum import Enum

BUILT_IN = ("math", "code", "code_unordered")
"""The verifiers of ours, by the names that ``reward.fn`` knows them under; they judge right (1) or wrong (0)."""
FORMAT = "format:"
"""What stands before a regular expression as the name of a reward: 1 for an answer that all of it matches, else 0."""


class ScoreWithReason(float):
    """A score that says why."""

    def __new__(cls, score: float, reason: str) -> "ScoreWithReason":
        graded = super().__new__(cls, score)
        graded.reason = reason
        return graded

    reason: str


class Status(Enum):
    ok = "ok"
    error = "error"
    timeout = "timeout"


@dataclass(frozen=True)
class Verdict:
    """``score`` is 0 unless ``status`` is ok; ``detail`` says what failed, or why code has its score."""

    score: float
    status: Status
    detail: str = ""
