"""Rows into micro-batches by a token budget, each sorted by length, for attention over runs of equal rows."""

from collections.abc import Sequence

from realhf.api.batch import RowId
from realhf.api.plan import MicroBatching
from realhf.base.partition import pack_bins


def micro_batches(
    ids: Sequence[RowId], lengths: Sequence[int], limits: MicroBatching, together: bool = False
) -> list[list[int]]:
    """Return row indices per micro-batch; ``together`` keeps the rows of one prompt in one of them."""
    atoms: list[list[int]] = [[i] for i in range(len(ids))]
    if together:
        groups: dict[int, list[int]] = {}
        for i, row in enumerate(ids):
            groups.setdefault(row.prompt, []).append(i)
        atoms = list(groups.values())
    weights = [sum(lengths[i] for i in atom) for atom in atoms]
    bins = pack_bins(weights, limits.max_tokens_per_mb, limits.n_mbs)
    return [sorted((i for a in part for i in atoms[a]), key=lambda i: (lengths[i], i)) for part in bins]
