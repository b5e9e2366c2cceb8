"""Partition of rows over data-parallel ranks and mini-batches; rows of one prompt stay together."""

from collections.abc import Sequence
from itertools import chain

from realhf.api.batch_meta import RowId
from realhf.base.partition import balanced_partition


def partition_rows(
    ids: Sequence[RowId], weights: Sequence[int], dp: int, n_minibatches: int = 1
) -> tuple[tuple[tuple[int, ...], ...], tuple[int, ...]]:
    """Return ``(assignment, minibatches)``: row indices per data-parallel rank, and the mini-batch of every row.

    Mini-batches are consecutive prompts and do not depend on ``dp``; the prompts of each are balanced over ranks by
    ``weights``. There are no divisibility requirements, so a rank may get no rows.
    """
    groups: dict[int, list[int]] = {}
    for i, row in enumerate(ids):
        if (group := groups.get(row.prompt)) is None:
            groups[row.prompt] = [i]
        else:
            group.append(i)
    prompts = sorted(groups)
    rows = [groups[prompt] for prompt in prompts]
    row_weights = [sum([weights[i] for i in group]) for group in rows]
    assignment: list[list[int]] = [[] for _ in range(dp)]
    minibatches, loads = [0] * len(ids), [0] * dp
    for minibatch in range(n_minibatches):
        start, stop = (-(-k * len(rows) // n_minibatches) for k in (minibatch, minibatch + 1))
        parts = balanced_partition(row_weights[start:stop], dp)
        part_weights = [sum([row_weights[start + k] for k in part]) for part in parts]
        # heavier parts go to ranks with lower load so far; ties are broken by the lower rank
        order = sorted(range(dp), key=loads.__getitem__)
        heavy = sorted(range(dp), key=part_weights.__getitem__, reverse=True)
        for rank, part in zip(order, heavy, strict=True):
            for k in parts[part]:
                assignment[rank] += rows[start + k]
            loads[rank] += part_weights[part]
        if minibatch:
            for i in chain.from_iterable(rows[start:stop]):
                minibatches[i] = minibatch
    return tuple([tuple(sorted(part)) for part in assignment]), tuple(minibatches)
