"""Judges a mathematical answer: finds it in the text, and compares it with those of the solutions."""

from collections.abc import Mapping

from realhf.rewards.math.equality import same_answer
from realhf.rewards.math.extract import extract_answer, marked_answer


def judge_math(prompt: str, answer: str, row: Mapping[str, object]) -> float:
    """Return 1.0 when ``answer`` agrees with any of ``row['solutions']``, else 0.0; no text makes it raise.

    Nothing here has a deadline; judges run in child processes that have one.
    """
    solutions = row["solutions"]
    if not isinstance(solutions, list) or not solutions:
        raise ValueError(f"row['solutions'] is {solutions!r}, it must be a list of texts")
    given = extract_answer(answer)
    if not given:
        return 0.0
    golds = [marked_answer(solution) for solution in solutions]
    return float(any(same_answer(given, s if gold is None else gold) for gold, s in zip(golds, solutions, strict=True)))
