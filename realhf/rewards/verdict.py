"""The result of judging one response; a failed judge is distinct from a wrong response."""

from dataclasses import dataclass, field
from enum import Enum

Item = tuple[str, str, dict]  # prompt, response, and the row of the dataset


@dataclass(frozen=True)
class ResponseGroup:
    """All responses to a prompt, in the order in which a function or a judge sees them.

    ``prompt_id`` is the prompt's number in the run; ``seed`` determines random choices of a judge.
    """

    prompt: str
    responses: tuple[str, ...]
    row: dict
    prompt_id: int = 0
    seed: int = 0


class ScoreWithReason(float):
    """A score with the reason for it."""

    def __new__(cls, score: float, reason: str) -> "ScoreWithReason":
        scored = super().__new__(cls, score)
        scored.reason = reason
        return scored

    reason: str


class Status(Enum):
    ok = "ok"
    error = "error"
    timeout = "timeout"


@dataclass(frozen=True)
class Verdict:
    """``score`` is 0 unless ``status`` is ok; ``detail`` is the error message or the reason for the score.

    ``scores`` are those of the responses of a group.
    """

    score: float
    status: Status
    detail: str = ""
    traceback: str = field(default="", compare=False)
    scores: tuple[float, ...] = ()
