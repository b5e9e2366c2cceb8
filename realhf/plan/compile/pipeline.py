"""Pipeline schedules: for each stage, the order in which micro-batches are received, computed and sent."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import count, pairwise


@dataclass(frozen=True)
class StageStep:
    """One step of a stage, for a micro-batch and one of the stage's chunks of layers; in generation: for a group."""

    micro_batch: int
    chunk: int = 0


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


@lru_cache(maxsize=1024)
def inference_schedule(stage: int, n_stages: int, n_micro_batches: int, n_chunks: int = 1) -> tuple[StageStep, ...]:
    """Return the schedule of forward passes. Groups of at least ``n_stages`` micro-batches pass through each chunk."""
    starts = [*range(0, max(n_micro_batches - n_stages, 0) + 1, n_stages), n_micro_batches]
    passes = _forwards([range(*pair) for pair in pairwise(starts)], n_chunks)
    return _with_messages(stage, n_stages, n_chunks, passes)


@lru_cache(maxsize=1024)
def train_schedule(stage: int, n_stages: int, n_micro_batches: int, n_chunks: int = 1) -> tuple[StageStep, ...]:
    """Return the 1F1B schedule of Narayanan et al. 2021 (arXiv 2104.04473, section 2.2), interleaved with chunks.

    At most ``max_in_flight`` passes have saved activations. Numbers of micro-batches that ``n_stages`` does
    not divide have the schedule of the next multiple, whose first micro-batches are left out.
    """
    passes = _one_f_one_b(stage, n_stages, n_micro_batches, n_chunks)
    return _with_messages(stage, n_stages, n_chunks, passes)


def max_in_flight(stage: int, n_stages: int, n_chunks: int = 1) -> int:
    """Return the maximum number of passes, each through one chunk of a stage, that have saved activations."""
    return _n_warm_up(stage, n_stages, n_chunks) + 1


def _n_warm_up(stage: int, n_stages: int, n_chunks: int) -> int:
    after = n_stages - 1 - stage
    return after if n_chunks == 1 else 2 * after + (n_chunks - 1) * n_stages


def _forwards(groups: Iterable[range], n_chunks: int) -> list[StageStep]:
    return [Forward(i, chunk) for group in groups for chunk in range(n_chunks) for i in group]


def _one_f_one_b(stage: int, n_stages: int, n_micro_batches: int, n_chunks: int) -> list[StageStep]:
    """Return the passes of a stage in order: forward passes ahead, then one forward and one backward pass in turn."""
    missing = -n_micro_batches % n_stages
    groups = (range(first, first + n_stages) for first in range(0, n_micro_batches + missing, n_stages))
    forwards = _forwards(groups, n_chunks)
    ahead = min(_n_warm_up(stage, n_stages, n_chunks), len(forwards))
    steps = forwards[:ahead]
    for number, forward in enumerate(forwards):
        steps += forwards[number + ahead : number + ahead + 1]
        steps.append(Backward(forward.micro_batch, n_chunks - 1 - forward.chunk))
    return [replace(step, micro_batch=step.micro_batch - missing) for step in steps if step.micro_batch >= missing]


def _with_messages(stage: int, n_stages: int, n_chunks: int, passes: Iterable[StageStep]) -> tuple[StageStep, ...]:
    """Receive the input of every pass before it, and send its result after it.

    In both schedules the two ends of a pair have its messages in the same order.
    """
    last, steps = n_stages * n_chunks - 1, list[StageStep]()
    for step in passes:
        number, where = step.chunk * n_stages + stage, (step.micro_batch, step.chunk)
        has_previous, has_next = number > 0, number < last
        if isinstance(step, Forward):
            steps += [RecvActivation(*where)] if has_previous else []
            steps += [step, SendActivation(*where)] if has_next else [step]
        else:
            steps += [RecvGradient(*where)] if has_next else []
            steps += [step, SendGradient(*where)] if has_previous else [step]
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
            if stage > 0:
                yield RecvActivation(i)
            yield Forward(i)
            if stage < n_stages - 1:
                yield SendActivation(i)
                yield ExpectTokens(i)
            elif n_stages > 1:
                yield SendTokens(i)
