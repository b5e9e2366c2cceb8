"""The score of a final reply by the verdict of ``reward.fn=math``."""

from typing import Any

from realhf.rewards.math.equality import judge_math


def score_math(reply: str, row: dict[str, Any]) -> float:
    """Return 1 if the final answer of a reply equals ``row["answer"]`` or one of ``row["solutions"]``, else 0."""
    solutions = row.get("solutions") or [str(row["answer"])]
    return judge_math("", reply, {"solutions": solutions})
