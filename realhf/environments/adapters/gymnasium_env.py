"""Environments of gymnasium whose actions are a text or integers."""

import re
from collections.abc import Callable, Mapping
from typing import Any

from realhf.base.errors import UserError
from realhf.environments.adapters.common import final_turn, observation_turn, optional_library
from realhf.environments.loading import load_class
from realhf.environments.types import Reply, Turn

INTEGER = re.compile(r"-?\d+")


class GymnasiumEnv:
    """An environment of ``gymnasium.make``: the reply's text is the action, the observation's text the next turn.

    ``id`` may be ``module:Name-v0``; ``make`` has further arguments of ``gymnasium.make``. ``render_observation`` is
    ``ansi`` (the environment's own text), or a function of the observation, ``file.py:function``. ``actions`` names
    discrete actions. An invalid action takes a turn, with the reward ``invalid_reward`` and a hint. ``reset`` of a row
    has options of reset.
    """

    def __init__(
        self,
        id: str,
        render_observation: str | None = None,
        make: Mapping[str, Any] | None = None,
        actions: list[str] | None = None,
        instruction: str = "",
        invalid_reward: float = -0.1,
        hint: str = "",
        chat: bool = True,
    ) -> None:
        self.id, self.render_observation, self.make = id, render_observation, dict(make or {})
        self.actions, self.instruction, self.hint = list(actions or []), instruction, hint
        self.invalid_reward, self.chat = invalid_reward, chat
        self._env: Any = None
        self._n_invalid = 0

    def reset(self, row: dict[str, Any], seed: int) -> Turn:
        with optional_library("gymnasium", "gymnasium", "GymnasiumEnv"):
            import gymnasium

        if self.render_observation == "ansi":
            self.make.setdefault("render_mode", "ansi")
        self.close()
        try:
            self._env = gymnasium.make(self.id, **self.make)
        except (gymnasium.error.Error, TypeError) as error:
            raise UserError(f"env.options.id={self.id!r}: gymnasium cannot make it: {error}") from error
        self._parse = self._parser(gymnasium)
        self._n_invalid = 0
        observation, _ = self._env.reset(seed=abs(seed), options=row.get("reset"))
        text = self._text(observation)
        return observation_turn(f"{self.instruction}\n{text}" if self.instruction else text, self.chat)

    def step(self, reply: Reply) -> Turn:
        action = self._parse(reply.text)
        if action is None:
            self._n_invalid += 1
            text = self.hint or f"This is not a valid action. {self._valid_actions()}"
            return observation_turn(text, self.chat, self.invalid_reward, {"invalid_actions": self._n_invalid})
        observation, reward, terminated, truncated, _ = self._env.step(action)
        text = self._text(observation)
        info = {"invalid_actions": self._n_invalid, "truncated": int(truncated and not terminated)}
        if terminated or truncated:
            return final_turn(text, self.chat, float(reward), info)
        return observation_turn(text, self.chat, float(reward), info)

    def close(self) -> None:
        """Close the environment; it may be closed twice."""
        if self._env is not None:
            self._env.close()
            self._env = None

    def _parser(self, gymnasium: Any) -> Callable[[str], Any]:
        """Return the function from a reply's text to an action, None for an invalid text."""
        space, spaces = self._env.action_space, gymnasium.spaces
        if isinstance(space, spaces.Text):
            return lambda text: text.strip() if text.strip() in space else None
        if isinstance(space, spaces.Discrete):
            return lambda text: self._discrete(text, int(space.start), int(space.n))
        if isinstance(space, spaces.MultiDiscrete | spaces.MultiBinary):
            import numpy as np

            def integers(text: str) -> Any:
                found = INTEGER.findall(text)
                if len(found) != space.shape[0] or any(len(one) > 18 for one in found):
                    return None
                action = np.array([int(one) for one in found], dtype=space.dtype)
                return action if action in space else None

            if len(space.shape) == 1:
                return integers
        raise UserError(
            f"env.options.id={self.id!r} has actions {space}; this adapter writes Text, Discrete, flat MultiDiscrete "
            "and MultiBinary actions: wrap the environment in one of these"
        )

    def _discrete(self, text: str, start: int, n: int) -> int | None:
        names = {name.lower(): start + number for number, name in enumerate(self.actions)}
        words = "|".join(rf"(?<!\w){re.escape(name)}(?!\w)" for name in sorted(names, key=len, reverse=True))
        found = re.findall(words, text.lower()) if names else []
        if found:
            return names[found[-1]]
        integers = INTEGER.findall(text)
        if not integers or len(integers[-1]) > 18:
            return None
        action = int(integers[-1])  # a model reasons first, and its last number is the action
        return action if start <= action < start + n else None

    def _valid_actions(self) -> str:
        space = self._env.action_space
        if self.actions:
            return f"Write one of: {', '.join(self.actions)}."
        if hasattr(space, "start") and hasattr(space, "n"):
            return f"Write an integer from {int(space.start)} to {int(space.start) + int(space.n) - 1}."
        return f"Valid actions are: {space}."

    def _text(self, observation: Any) -> str:
        if self.render_observation == "ansi":
            return str(self._env.render())
        if self.render_observation:
            return str(load_class(self.render_observation)(observation))
        return observation_text(observation)


def observation_text(observation: Any) -> str:
    """Return an observation as text: one line per entry of a mapping, numbers of arrays as lists."""
    if isinstance(observation, str):
        return observation
    if isinstance(observation, Mapping):
        return "\n".join(f"{key}: {observation_text(value)}" for key, value in observation.items())
    if isinstance(observation, tuple | list):
        return f"({', '.join(map(observation_text, observation))})"
    return str(observation.tolist() if hasattr(observation, "tolist") else observation)
