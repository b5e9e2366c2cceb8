"""Turns of multi-turn rollouts: what an engine samples, and the driver that requests it. Imports no torch."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

EpisodeKey = tuple[int, int]
"""Prompt number and sample."""


@dataclass(frozen=True)
class TurnInput:
    """Appends ``tokens`` to an episode, and samples up to ``limit`` further ones, including a stop token.

    For the first turn ``tokens`` is the prompt. They may be empty only if the last turn was truncated. A closed episode
    may be opened again, with all of its tokens and the ``count`` of those that were sampled.
    """

    key: EpisodeKey
    tokens: list[int]
    limit: int
    count: int = 0


@dataclass(frozen=True)
class TurnOutput:
    """The sampled tokens of a turn, with log-probabilities of the tempered distribution and of the restricted one."""

    key: EpisodeKey
    tokens: list[int]
    logprobs: list[float]
    sampling_logprobs: list[float]
    stopped: bool


@dataclass(frozen=True)
class TurnRequest:
    """New turns, and episodes whose cache can be released. ``done`` ends the rollout."""

    inputs: list[TurnInput] = field(default_factory=list)
    closed: list[EpisodeKey] = field(default_factory=list)
    done: bool = False


class TurnDriver(Protocol):
    """Decides which turns are sampled. It runs on one rank of a replica."""

    def next(self, outputs: Sequence[TurnOutput], is_idle: bool) -> TurnRequest:
        """Take finished turns, and return new ones; wait for one if the engine ``is_idle``."""

    def result(self) -> bytes:
        """Return the result, which all ranks of the replica receive."""
