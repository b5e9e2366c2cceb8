"""Which rows go to which data-parallel rank and mini-batch: groups of one prompt stay together, loads are balanced."""

from collections.abc import Sequence

from realhf.api.batch import RowId
from realhf.base.partition import balanced_partition


def deal_rows(
    ids: Sequence[RowId], weights: Sequence[int], dp: int, n_minibatches: int = 1
) -> tuple[tuple[tuple[int, ...], ...], tuple[int, ...]]:
    """Return ``(assignment, minibatches)``: row indices per data-parallel rank, and the mini-batch of every row.

    Mini-batches are runs of prompts in order, the same under any ``dp``; inside each of them prompts are balanced over
    ranks by ``weights``. Nothing has to divide anything; a rank may get no row.
    """
    groups: dict[int, list[int]] = {}
    for i, row in enumerate(ids):
        groups.setdefault(row.prompt, []).append(i)
    prompts = sorted(groups)
    weight = {p: sum([weights[i] for i in at]) for p, at in groups.items()}
    number = {p: k * n_minibatches // len(prompts) for k, p in enumerate(prompts)}
    assignment: list[list[int]] = [[] for _ in range(dp)]
    loads = [0] * dp
    for minibatch in range(n_minibatches):
        members = [p for p in prompts if number[p] == minibatch]
        parts = balanced_partition([weight[p] for p in members], dp)
        part_weights = [sum([weight[members[k]] for k in part]) for part in parts]
        # heavier parts go to ranks that carry less so far
        order = sorted(range(dp), key=lambda d: (loads[d], d))
        heavy = sorted(range(dp), key=lambda d: (-part_weights[d], d))
        for rank, part in zip(order, heavy, strict=True):
            assignment[rank] += [i for k in parts[part] for i in groups[members[k]]]
            loads[rank] += part_weights[part]
    return tuple(tuple(sorted(part)) for part in assignment), tuple([number[row.prompt] for row in ids])
