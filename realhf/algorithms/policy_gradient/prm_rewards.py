"""Step rewards from a process reward model, shaped so that repeating good steps is not rewarded.

Gao et al. 2024 (arXiv 2410.15115): step rewards, after Clip and Delta, are added to the outcome reward. Columns of
steps have one element per step, ``[S]``.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from realhf.algorithms.policy_gradient.config import PRMRewardConfig
from realhf.api.config import Delta
from realhf.api.config.preference import Aggregate
from realhf.data.batch import Column

AGGREGATES: dict[Aggregate, Callable[[Tensor], Tensor]] = {
    Aggregate.min: Tensor.min,
    Aggregate.prod: Tensor.prod,
    Aggregate.last: lambda row: row[-1],
    Aggregate.mean: Tensor.mean,
}


def aggregate(steps: Column, how: Aggregate) -> Tensor:
    """Return one score per response, ``[B]``, from the scores of its steps; NaN without steps."""
    scores = [AGGREGATES[how](row) if len(row) else row.new_full((), torch.nan) for row in steps.rows()]
    return torch.stack(scores) if scores else steps.data


def clip(q: Tensor, eta: float) -> Tensor:
    """Return ``min(q - eta, 0)``, ``[S]``."""
    return (q - eta).clamp(max=0.0)


def delta(steps: Column, kind: Delta) -> Tensor:
    """Return differences of adjacent step rewards within each response, ``[S]``; a single step gets 0."""
    if kind is Delta.none:
        return steps.data
    parts = [steps.data[:0]]
    for row in steps.rows():
        differences = row[:-1] - row[1:] if kind is Delta.paper else row[1:] - row[:-1]
        if kind is Delta.paper and len(row) > 1:
            differences[-1] = row[-2]
        parts += [differences, row.new_zeros(min(len(row), 1))]
    return torch.cat(parts)


def shape_step_rewards(dense: Column, config: PRMRewardConfig, eta: float) -> Tensor:
    """Return the shaped step rewards on the last tokens of steps, 0 elsewhere, ``[T]``.

    ``dense`` holds the probability of each step on its last token, -1 elsewhere; ``eta`` is Clip's threshold.
    """
    ends = dense.data >= 0
    q = dense.data[ends]
    steps = Column(clip(q, eta) if config.clip else q, tuple(int((row >= 0).sum()) for row in dense.rows()))
    return torch.zeros_like(dense.data).masked_scatter(ends, config.alpha * delta(steps, config.delta))
