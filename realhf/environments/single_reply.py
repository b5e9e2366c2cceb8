"""An environment of one reply: single responses with what multi-turn rollouts have, such as partial rollouts."""

from typing import Any, Protocol

from realhf.environments.loading import load_class
from realhf.environments.types import Reply, Turn


class RewardFn(Protocol):
    """A function for ``reward.fn``."""

    def __call__(self, prompt: Any, answer: str, row: dict[str, Any]) -> float: ...


class SingleReply:
    """The model replies once to the prompt of a row, and the reply is scored, also one that is cut at its limit.

    ``fn`` is as ``reward.fn``: a function of the row's ``prompt``, the text of the reply and the row, or its name
    ``my_file.py:function``, or ``math``. Functions run in the process of the environment. ValueError for another name.
    """

    def __init__(self, fn: str | RewardFn = "math") -> None:
        if isinstance(fn, str) and fn != "math" and ":" not in fn:
            raise ValueError(f"fn={fn!r} must be 'math', 'file.py:function' or 'package.module:function'")
        self._fn: RewardFn = _math_reward() if fn == "math" else load_class(fn) if isinstance(fn, str) else fn
        self._row: dict[str, Any] = {}

    def reset(self, row: dict[str, Any], seed: int) -> Turn:
        self._row = row
        return Turn()

    def step(self, reply: Reply) -> Turn:
        return Turn(reward=float(self._fn(self._row.get("prompt", ""), reply.text, self._row)), done=True)


def _math_reward() -> RewardFn:
    score = load_class("realhf.rewards.tools.math_score:score_math")
    return lambda prompt, answer, row: score(answer, row)
