"""Partition of rows over data-parallel ranks and mini-batches, and into micro-batches by a token budget."""

from collections import defaultdict
from collections.abc import Sequence
from itertools import chain

from realhf.api.batch_meta import RowId
from realhf.api.execution_plan import MicroBatching
from realhf.base.partition import balanced_partition, pack_bins


def partition_rows(
    ids: Sequence[RowId], weights: Sequence[int], dp: int, n_minibatches: int = 1
) -> tuple[tuple[tuple[int, ...], ...], tuple[int, ...]]:
    """Return ``(assignment, minibatches)``: row indices per data-parallel rank, and the mini-batch of every row.

    Mini-batches are consecutive prompts and do not depend on ``dp``; the prompts of each are balanced over ranks by
    ``weights``. There are no divisibility requirements, so a rank may get no rows.
    """
    rows = [group for _, group in sorted(_by_prompt(ids).items())]
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


def _by_prompt(ids: Sequence[RowId]) -> dict[int, list[int]]:
    groups: dict[int, list[int]] = defaultdict(list)
    for i, row in enumerate(ids):
        groups[row.prompt].append(i)
    return groups


def micro_batches(
    ids: Sequence[RowId],
    lengths: Sequence[int],
    limits: MicroBatching,
    keep_prompts_together: bool = False,
    prefer_prompts_together: bool = False,
    multiple_of: int = 1,
) -> list[list[int]]:
    """Return row indices per micro-batch, sorted by length for batched attention.

    ``keep_prompts_together`` puts all rows of a prompt into one micro-batch, even if they exceed the token budget;
    ``prefer_prompts_together`` does so as far as the budget allows, which is faster. With neither, ``ids`` are unused.
    The number of micro-batches is a ``multiple_of`` another one if there are enough rows for the next multiple.
    """
    groups: list[list[int]] = []
    if keep_prompts_together or prefer_prompts_together:
        groups = [*_by_prompt(ids).values()]
        if not keep_prompts_together:
            share = min(limits.max_tokens_per_mb, sum(lengths) // limits.n_mbs)
            groups = [part for rows in groups for part in _split_rows(rows, lengths, share)]
            if len(groups) < min(limits.n_mbs, len(ids)):
                groups = []
    groups = groups or [[i] for i in range(len(lengths))]
    weights = [sum(lengths[i] for i in rows) for rows in groups]
    bins = pack_bins(weights, limits.max_tokens_per_mb, limits.n_mbs)
    while len(bins) < (n := len(bins) + -len(bins) % multiple_of) <= len(groups):
        bins = pack_bins(weights, limits.max_tokens_per_mb, n)
    return [sorted((i for group in part for i in groups[group]), key=lambda i: (lengths[i], i)) for part in bins]


def _split_rows(rows: Sequence[int], lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Split rows into consecutive parts of at most ``capacity`` tokens, or one row."""
    parts: list[list[int]] = []
    n_tokens = capacity
    for row in rows:
        if n_tokens + lengths[row] > capacity or not parts:
            parts.append([])
            n_tokens = 0
        parts[-1].append(row)
        n_tokens += lengths[row]
    return parts
