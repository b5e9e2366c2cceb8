"""Rewards for the length of responses, the values of ``ppo.length_penalty``. Imports no torch.

Each is added to the reward of a response. Groups are the responses to a prompt.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import exp
from typing import TYPE_CHECKING

from realhf.algorithms.policy_gradient.components import Component
from realhf.api.config import opt
from realhf.api.config.option import NON_NEGATIVE, POSITIVE

if TYPE_CHECKING:
    from torch import Tensor

    from realhf.algorithms.policy_gradient.config import PPOConfig


@dataclass(frozen=True)
class LengthInputs:
    """``rewards`` and ``lengths`` (sampled tokens) of responses, ``[B]``, their prompts, and the longest length."""

    rewards: Tensor
    lengths: Tensor
    groups: Sequence[int]
    longest: int

    def of_groups(self, fn: Callable[[list[float], list[float]], list[float]]) -> Tensor:
        """Return ``fn(rewards, lengths)`` of each group, ``[B]``."""
        members = defaultdict[int, list[int]](list)
        for row, number in enumerate(self.groups):
            members[number].append(row)
        rewards, lengths, found = self.rewards.tolist(), self.lengths.tolist(), [0.0] * len(self.groups)
        for rows in members.values():
            values = fn([rewards[row] for row in rows], [lengths[row] for row in rows])
            for row, value in zip(rows, values, strict=True):
                found[row] = value
        return self.rewards.new_tensor(found)


@dataclass
class LinearOptions:
    coef: float = opt(0.1, "penalty of a response of max_new_tokens", NON_NEGATIVE)


@dataclass
class TargetOptions:
    tokens: float = opt(512.0, "target length", POSITIVE)
    coef: float = opt(3e-4, "penalty per token of difference", NON_NEGATIVE)


@dataclass
class GroupLengthOptions:
    coef: float = opt(0.1, "weight relative to the reward", NON_NEGATIVE)


def no_penalty(x: LengthInputs, _: None) -> Tensor:
    return x.rewards * 0.0


def linear(x: LengthInputs, options: LinearOptions) -> Tensor:
    return -options.coef * x.lengths / x.longest


def target(x: LengthInputs, options: TargetOptions) -> Tensor:
    return -options.coef * (x.lengths - options.tokens).abs()


def group_range(x: LengthInputs, options: GroupLengthOptions) -> Tensor:
    """Return from +coef / 2 for the shortest to -coef / 2 for the longest response; a wrong one has no bonus.

    A response is right if its reward is positive.
    """

    def of_group(rewards: list[float], lengths: list[float]) -> list[float]:
        shortest, span = min(lengths), max(lengths) - min(lengths)
        places = [0.5 - (n - shortest) / span if span else 0.0 for n in lengths]
        return [options.coef * (place if reward > 0 else min(0.0, place))
                for place, reward in zip(places, rewards, strict=True)]  # fmt: skip

    return x.of_groups(of_group)


def group_sigmoid(x: LengthInputs, options: GroupLengthOptions) -> Tensor:
    """Return ``-coef * reward * sigmoid((length - mean) / std)`` of right responses, over those of the group."""

    def of_group(rewards: list[float], lengths: list[float]) -> list[float]:
        right = [n for n, reward in zip(lengths, rewards, strict=True) if reward > 0]
        mean = sum(right) / max(len(right), 1)
        std = (sum((n - mean) ** 2 for n in right) / max(len(right), 1)) ** 0.5
        return [-options.coef * reward / (1.0 + exp((mean - n) / (std + 1e-7))) if reward > 0 else 0.0
                for n, reward in zip(lengths, rewards, strict=True)]  # fmt: skip

    return x.of_groups(of_group)


def check_group(ppo: PPOConfig) -> list[str]:
    name = ppo.length_penalty.value
    return [] if ppo.group_size > 1 else [f"ppo.length_penalty={name} compares responses: it needs ppo.group_size > 1"]


LENGTH_PENALTIES: dict[str, Component[LengthInputs, Tensor]] = {
    "none": Component(no_penalty, "none"),
    "linear": Component(linear, "proportional to the length", LinearOptions),
    "target": Component(target, "distance from a target length (L1-exact, arXiv 2503.04697, eq. 1)", TargetOptions),
    "group_range": Component(group_range, "place between the shortest and the longest response (Kimi k1.5, arXiv "
                             "2501.12599, sec. 2.3.3)", GroupLengthOptions, check_group),
    "group_sigmoid": Component(group_sigmoid, "right responses, by deviations from the mean length of right ones "
                               "(arXiv 2502.04463, eq. 2)", GroupLengthOptions, check_group),
}  # fmt: skip
