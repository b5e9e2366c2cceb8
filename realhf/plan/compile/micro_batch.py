"""Partition of rows into micro-batches by a token budget; rows are sorted by length, for batched attention."""

from collections.abc import Sequence

from realhf.api.batch_meta import RowId
from realhf.api.execution_plan import MicroBatching
from realhf.base.partition import pack_bins


def micro_batches(
    ids: Sequence[RowId],
    lengths: Sequence[int],
    limits: MicroBatching,
    keep_prompts_together: bool = False,
    prefer_prompts_together: bool = False,
) -> list[list[int]]:
    """Return row indices per micro-batch.

    ``keep_prompts_together`` puts all rows of a prompt into one micro-batch, even if they exceed the token budget;
    ``prefer_prompts_together`` does so as far as the budget allows, which is faster. With neither, ``ids`` are unused.
    """
    groups: list[list[int]] = []
    if keep_prompts_together or prefer_prompts_together:
        by_prompt: dict[int, list[int]] = {}
        for i, row in enumerate(ids):
            by_prompt.setdefault(row.prompt, []).append(i)
        groups = list(by_prompt.values())
        if not keep_prompts_together:
            share = min(limits.max_tokens_per_mb, sum(lengths) // limits.n_mbs)
            groups = [part for rows in groups for part in _split_rows(rows, lengths, share)]
            if len(groups) < min(limits.n_mbs, len(ids)):
                groups = []
    if not groups:
        bins = pack_bins(lengths, limits.max_tokens_per_mb, limits.n_mbs)
        return [sorted(part, key=lambda i: lengths[i]) for part in bins]  # a stable sort: ties keep the order of rows
    weights = [sum(lengths[i] for i in group) for group in groups]
    bins = pack_bins(weights, limits.max_tokens_per_mb, limits.n_mbs)
    return [sorted((i for g in part for i in groups[g]), key=lambda i: (lengths[i], i)) for part in bins]


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
