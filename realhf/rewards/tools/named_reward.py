"""Rewards of single responses by the names of ``reward.fn``, for environments."""

from realhf.rewards.registry import FORMAT, VERIFIERS, RewardFn, load_reward
from realhf.rewards.tools.math_score import score_math


def named_reward(fn: str, timeout: float, test_timeout: float) -> RewardFn:
    """Return a built-in verifier, with limits in seconds per response and per test of a program, or ``format:REGEX``.

    Rows for ``math`` may have ``answer`` instead of ``solutions``. ValueError for another name.
    """
    if fn == "math":
        return lambda prompt, answer, row: score_math(answer, row)
    if fn in VERIFIERS or fn.startswith(FORMAT):
        return load_reward(fn, timeout, test_timeout)
    names = ", ".join(VERIFIERS)
    raise ValueError(f"fn={fn!r} must be one of {names}, 'format:REGEX', 'file.py:function' or 'package:function'")
