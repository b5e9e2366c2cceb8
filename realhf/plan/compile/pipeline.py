"""Pipeline schedules: for one stage, the order in which micro-batches are received, computed and sent.

In generation a micro-batch is a group of rows, which passes the stages again and again, one turn after the other.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import count


@dataclass(frozen=True)
class RecvActivation:
    micro_batch: int


@dataclass(frozen=True)
class Forward:
    micro_batch: int


@dataclass(frozen=True)
class SendActivation:
    micro_batch: int


@dataclass(frozen=True)
class RecvGradient:
    micro_batch: int


@dataclass(frozen=True)
class Backward:
    micro_batch: int


@dataclass(frozen=True)
class SendGradient:
    micro_batch: int


@dataclass(frozen=True)
class ExpectTokens:
    """Post the receive of what the last stage will draw for a group in this turn, without waiting."""

    micro_batch: int


@dataclass(frozen=True)
class SendTokens:
    """Tell all other stages what was drawn."""

    micro_batch: int


@dataclass(frozen=True)
class Advance:
    """Take the tokens that a group drew in its last turn and decide what its next one computes."""

    micro_batch: int


StageStep = (
    RecvActivation
    | Forward
    | SendActivation
    | RecvGradient
    | Backward
    | SendGradient
    | ExpectTokens
    | SendTokens
    | Advance
)


def _forward(stage: int, n_stages: int, i: int) -> list[StageStep]:
    steps: list[StageStep] = [RecvActivation(i)] if stage > 0 else []
    steps.append(Forward(i))
    return steps + ([SendActivation(i)] if stage < n_stages - 1 else [])


def _backward(stage: int, n_stages: int, i: int) -> list[StageStep]:
    steps: list[StageStep] = [RecvGradient(i)] if stage < n_stages - 1 else []
    steps.append(Backward(i))
    return steps + ([SendGradient(i)] if stage > 0 else [])


@lru_cache(maxsize=1024)
def inference_schedule(stage: int, n_stages: int, n_micro_batches: int) -> tuple[StageStep, ...]:
    """Stream micro-batches through the stages one after the other."""
    return tuple(step for i in range(n_micro_batches) for step in _forward(stage, n_stages, i))


@lru_cache(maxsize=1024)
def train_schedule(stage: int, n_stages: int, n_micro_batches: int) -> tuple[StageStep, ...]:
    """One forward, one backward (PipeDream-flush, Narayanan et al. 2021): stage s holds at most n_stages - s."""
    ahead = min(n_stages - 1 - stage, n_micro_batches)
    steps = [step for i in range(ahead) for step in _forward(stage, n_stages, i)]
    for i in range(n_micro_batches):
        if i + ahead < n_micro_batches:
            steps += _forward(stage, n_stages, i + ahead)
        steps += _backward(stage, n_stages, i)
    return tuple(steps)


def generation_schedule(stage: int, n_stages: int, n_groups: int) -> Iterator[StageStep]:
    """Let groups of rows follow one another through the stages, turn after turn, without end.

    A group's next turn waits for its own tokens alone, so no stage is idle when there are as many groups as stages.
    Tokens are expected where activations are sent: any two stages post what they exchange in the same order, and
    sends may as well wait for their receivers. Every stage advances the groups in the same order. Raises ValueError
    without a group.
    """
    if n_groups < 1:
        raise ValueError(f"generation needs a group of rows, got {n_groups}")
    for turn in count():
        for i in range(n_groups):
            if turn > 0:
                yield Advance(i)
            yield from _forward(stage, n_stages, i)
            if stage < n_stages - 1:
                yield ExpectTokens(i)
            elif n_stages > 1:
                yield SendTokens(i)
