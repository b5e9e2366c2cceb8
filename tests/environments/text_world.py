"""Environments of gymnasium for the tests: one with text spaces, and one whose actions are no text."""

from typing import Any

import gymnasium
from gymnasium.spaces import Box, MultiDiscrete, Text


class Words(gymnasium.Env):
    """Repeat the word, twice; the words come from the seed."""

    def __init__(self) -> None:
        self.action_space = self.observation_space = Text(max_length=5, charset="abc")

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict]:
        super().reset(seed=seed)
        self.count = 0
        self.word = (options or {}).get("word") or "".join(self.np_random.choice(list("abc"), 5))
        return self.word, {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict]:
        self.count += 1
        return self.word, float(action == self.word), self.count == 2, False, {}


class Pairs(Words):
    """Actions are two integers."""

    def __init__(self) -> None:
        self.observation_space = Text(5)
        self.action_space = MultiDiscrete([3, 4])

    def step(self, action: Any) -> tuple[str, float, bool, bool, dict]:
        return "", float(action.sum()), True, False, {}


class Floats(Words):
    def __init__(self) -> None:
        self.observation_space, self.action_space = Text(5), Box(0.0, 1.0)


def upper(observation: str) -> str:
    return f"<{observation.upper()}>"


for cls in (Words, Pairs, Floats):
    gymnasium.register(f"{cls.__name__}-v0", entry_point=cls)
