"""What a judge says of one answer; a judge that failed is told apart from a wrong answer."""

from dataclasses import dataclass
from enum import Enum


class Status(Enum):
    ok = "ok"
    error = "error"
    timeout = "timeout"


@dataclass(frozen=True)
class Verdict:
    """``score`` is 0 unless ``status`` is ok; ``detail`` says what failed."""

    score: float
    status: Status
    detail: str = ""
