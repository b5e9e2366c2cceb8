"""Pipeline schedules: for each stage, the order in which micro-batches are received, computed and sent."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import count


@dataclass(frozen=True)
class StageStep:
    """One step of a stage, for a micro-batch; in generation: for a group of rows."""

    micro_batch: int


class RecvActivation(StageStep): ...


class Forward(StageStep): ...


class SendActivation(StageStep): ...


class RecvGradient(StageStep): ...


class Backward(StageStep): ...


class SendGradient(StageStep): ...


class ExpectTokens(StageStep):
    """Post the receive of the tokens that the last stage will sample for a group, without waiting."""


class SendTokens(StageStep):
    """Send the sampled tokens to all other stages."""


class Advance(StageStep):
    """Wait for the tokens sampled for a group in the previous step, and schedule its next step."""


def _forward(stage: int, n_stages: int, i: int) -> list[StageStep]:
    before: list[StageStep] = [RecvActivation(i)] if stage > 0 else []
    return [*before, Forward(i), *([SendActivation(i)] if stage < n_stages - 1 else [])]


def _backward(stage: int, n_stages: int, i: int) -> list[StageStep]:
    before: list[StageStep] = [RecvGradient(i)] if stage < n_stages - 1 else []
    return [*before, Backward(i), *([SendGradient(i)] if stage > 0 else [])]


@lru_cache(maxsize=1024)
def inference_schedule(stage: int, n_stages: int, n_micro_batches: int) -> tuple[StageStep, ...]:
    return tuple(step for i in range(n_micro_batches) for step in _forward(stage, n_stages, i))


@lru_cache(maxsize=1024)
def train_schedule(stage: int, n_stages: int, n_micro_batches: int) -> tuple[StageStep, ...]:
    """Return the 1F1B schedule (PipeDream-flush, Narayanan et al. 2021) with at most n_stages - stage in flight."""
    ahead = min(n_stages - 1 - stage, n_micro_batches)
    steps = [step for i in range(ahead) for step in _forward(stage, n_stages, i)]
    for i in range(n_micro_batches):
        if i + ahead < n_micro_batches:
            steps += _forward(stage, n_stages, i + ahead)
        steps += _backward(stage, n_stages, i)
    return tuple(steps)


def generation_schedule(stage: int, n_stages: int, n_groups: int) -> Iterator[StageStep]:
    """Yield an endless schedule in which groups of rows pass through the stages in turn, once per decoding step.

    The next step of a group depends only on its own tokens, so no stage is idle if there are at least as many groups as
    stages. Receives of tokens are posted where activations are sent, so any two stages post their messages in the same
    order and sends may block. All stages advance the groups in the same order. Raises ValueError without a group.
    """
    if n_groups < 1:
        raise ValueError(f"generation needs at least one group of rows, got {n_groups}")
    for step in count():
        for i in range(n_groups):
            if step > 0:
                yield Advance(i)
            yield from _forward(stage, n_stages, i)
            if stage < n_stages - 1:
                yield ExpectTokens(i)
            elif n_stages > 1:
                yield SendTokens(i)
