"""An environment of one reply: single responses with what multi-turn rollouts have.

A reply is scored as soon as it is complete, while others are sampled, and rollouts may be partial.
"""

import inspect
from functools import cache
from typing import Any, Protocol

from realhf.environments.loading import load_class
from realhf.environments.types import Reply, Turn

NAMED = "realhf.rewards.tools.named_reward:named_reward"


class RewardFn(Protocol):
    """A function for ``reward.fn``."""

    def __call__(self, prompt: Any, answer: str, row: dict[str, Any]) -> float: ...


class SingleReply:
    """The model replies once to the prompt of a row, and the reply is scored, also one that is cut at its limit.

    ``fn`` is as ``reward.fn``: a function of the row's ``prompt``, the text of the reply and the row, or its name
    ``my_file.py:function``, or a verifier such as ``math`` or ``code``, or ``format:REGEX``. It runs in the process of
    the environment. A verifier takes at most ``timeout`` seconds per response, and ``test_timeout`` per test of a
    program; ``env.timeout`` must be longer. ValueError for another name, or an asynchronous function.
    """

    def __init__(self, fn: str | RewardFn = "math", timeout: float = 20.0, test_timeout: float = 6.0) -> None:
        self._fn: RewardFn = _load(fn, timeout, test_timeout) if isinstance(fn, str) else fn
        if inspect.iscoroutinefunction(self._fn):
            raise ValueError(f"fn={fn!r} must not be asynchronous")
        self._row: dict[str, Any] = {}

    def reset(self, row: dict[str, Any], seed: int) -> Turn:
        self._row = row
        return Turn()

    def step(self, reply: Reply) -> Turn:
        return Turn(reward=float(self._fn(self._row.get("prompt", ""), reply.text, self._row)), done=True)


@cache  # a process has the environments of many episodes
def _load(fn: str, timeout: float, test_timeout: float) -> RewardFn:
    is_function = ":" in fn and not fn.startswith("format:")
    found: RewardFn = load_class(fn) if is_function else load_class(NAMED)(fn, timeout, test_timeout)
    return found
