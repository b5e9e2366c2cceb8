"""Rows into micro-batches by a token budget, each sorted by length, for attention over runs of equal rows."""

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
    """Return row indices per micro-batch; ``together`` keeps the rows of one prompt in one of them.

    ``near`` keeps as many of them together as the limits allow: they are computed faster so. With neither, ``ids`` are
    not looked at.
    """
    atoms: list[list[int]] = []
    if keep_prompts_together or prefer_prompts_together:
        groups: dict[int, list[int]] = {}
        for i, row in enumerate(ids):
            groups.setdefault(row.prompt, []).append(i)
        wholes = list(groups.values())
        share = min(limits.max_tokens_per_mb, sum(lengths) // limits.n_mbs)
        pieces = (
            wholes if keep_prompts_together else [piece for rows in wholes for piece in _pieces(rows, lengths, share)]
        )
        if keep_prompts_together or len(pieces) >= min(limits.n_mbs, len(ids)):
            atoms = pieces
    if not atoms:
        bins = pack_bins(lengths, limits.max_tokens_per_mb, limits.n_mbs)
        return [sorted(part, key=lambda i: lengths[i]) for part in bins]  # each is in the order of rows
    weights = [sum(lengths[i] for i in atom) for atom in atoms]
    bins = pack_bins(weights, limits.max_tokens_per_mb, limits.n_mbs)
    return [sorted((i for a in part for i in atoms[a]), key=lambda i: (lengths[i], i)) for part in bins]


def _pieces(rows: Sequence[int], lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Cut rows into runs of at most ``capacity`` tokens, or one row."""
    pieces: list[list[int]] = []
    filled = capacity
    for row in rows:
        if filled + lengths[row] > capacity or not pieces:
            pieces.append([])
            filled = 0
        pieces[-1].append(row)
        filled += lengths[row]
    return pieces
