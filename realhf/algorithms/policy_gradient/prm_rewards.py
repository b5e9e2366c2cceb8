"""Step rewards from a process reward model, shaped so that repeating good steps is not rewarded.

Gao et al. 2024, "On Designing Effective RL Reward at Training Time for LLM Reasoning" (arXiv 2410.15115): step rewards
q_k, after Clip and Delta, are added to the outcome reward. Step columns are packed, ``[S]``: ``counts`` holds the
number of steps of each response.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from realhf.algorithms.policy_gradient.config import PRMRewardConfig
from realhf.api.config import Delta
from realhf.api.config.preference import Aggregate

AGGREGATES: dict[Aggregate, Callable[[Tensor], Tensor]] = {
    Aggregate.min: Tensor.min,
    Aggregate.prod: Tensor.prod,
    Aggregate.last: lambda row: row[-1],
    Aggregate.mean: Tensor.mean,
}


def aggregate(q: Tensor, counts: Sequence[int], how: Aggregate) -> Tensor:
    """Return one score per response, ``[B]``, from its step scores ``q`` ``[S]``; NaN without steps."""
    scores = [AGGREGATES[how](row) if len(row) else q.new_full((), torch.nan) for row in split_steps(q, counts)]
    return torch.stack(scores) if scores else q.new_empty(0)


def clip(q: Tensor, eta: float) -> Tensor:
    """Return ``min(q - eta, 0)``, ``[S]``."""
    return (q - eta).clamp(max=0.0)


def delta(q: Tensor, counts: Sequence[int], kind: Delta) -> Tensor:
    """Return differences of adjacent step rewards ``q`` within each response, ``[S]``; a single step gets 0."""
    if kind is Delta.none:
        split_steps(q, counts)
        return q
    parts = []
    for row in split_steps(q, counts):
        steps = row[:-1] - row[1:] if kind is Delta.paper else row[1:] - row[:-1]
        if kind is Delta.paper and len(row) > 1:
            steps = torch.cat([steps[:-1], row[-2:-1]])
        parts.append(torch.cat([steps, row.new_zeros(min(len(row), 1))]))
    return torch.cat([q[:0], *parts])


def shape_step_rewards(dense: Tensor, lengths: Sequence[int], config: PRMRewardConfig, eta: float) -> Tensor:
    """Return the shaped step rewards on the last tokens of steps, 0 elsewhere, ``[T]``.

    ``dense`` ``[T]`` holds the probability of each step on its last token, 0 elsewhere; ``eta`` is Clip's threshold.
    """
    ends = dense > 0
    counts = [int(row.sum()) for row in ends.split(tuple(lengths))] if lengths else []
    q = dense[ends]
    steps = config.alpha * delta(clip(q, eta) if config.clip else q, counts, config.delta)
    return torch.zeros_like(dense).masked_scatter(ends, steps)


def split_steps(q: Tensor, counts: Sequence[int]) -> list[Tensor]:
    """Split ``q`` ``[S]`` into responses; ValueError if ``counts`` do not add up to S."""
    if sum(counts) != len(q) or min(counts, default=0) < 0:
        raise ValueError(f"counts={list(counts)} do not add up to the {len(q)} steps")
    return list(q.split(list(counts)))
