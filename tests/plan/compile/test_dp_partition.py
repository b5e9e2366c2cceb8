"""Partition of rows over data-parallel ranks and mini-batches."""

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from realhf.api.batch_meta import RowId
from realhf.plan.compile.dp_partition import partition_rows
from tests.scaling import examples

GROUPS = st.lists(st.lists(st.integers(0, 99), min_size=1, max_size=4), max_size=12)
SMALL = st.integers(1, 5)


def rows_of(groups: list[list[int]]) -> tuple[list[RowId], list[int]]:
    """Return interleaved rows of prompts 10, 11, ... and their weights."""
    ids = [RowId(10 + p, s) for s in range(4) for p, group in enumerate(groups) if s < len(group)]
    return ids, [groups[row.prompt - 10][row.sample] for row in ids]


@settings(max_examples=examples(50))
@given(GROUPS, SMALL, SMALL)
def test_every_row_is_assigned_once_and_groups_stay_together(
    groups: list[list[int]], dp: int, n_minibatches: int
) -> None:
    ids, weights = rows_of(groups)
    assignment, minibatches = partition_rows(ids, weights, dp, n_minibatches)
    assert len(assignment) == dp and sorted(i for part in assignment for i in part) == list(range(len(ids)))
    assert all(list(part) == sorted(part) for part in assignment)
    rank = {i: d for d, part in enumerate(assignment) for i in part}
    for prompt in {row.prompt for row in ids}:
        mine = [i for i, row in enumerate(ids) if row.prompt == prompt]
        assert len({rank[i] for i in mine}) == len({minibatches[i] for i in mine}) == 1


@settings(max_examples=examples(50))
@given(GROUPS, SMALL, SMALL)
def test_minibatches_do_not_depend_on_dp(groups: list[list[int]], dp: int, n_minibatches: int) -> None:
    ids, weights = rows_of(groups)
    _, minibatches = partition_rows(ids, weights, dp, n_minibatches)
    assert minibatches == partition_rows(ids, weights, 1, n_minibatches)[1]
    assert all(0 <= k < n_minibatches for k in minibatches)
    number = {row.prompt: k for row, k in zip(ids, minibatches, strict=True)}
    assert [number[p] for p in sorted(number)] == sorted(number.values())
    counts = [Counter(number.values())[k] for k in range(n_minibatches)]
    assert max(counts) - min(counts) <= 1


@settings(max_examples=examples(50))
@given(GROUPS, SMALL, SMALL)
def test_loads_differ_by_at_most_one_group(groups: list[list[int]], dp: int, n_minibatches: int) -> None:
    ids, weights = rows_of(groups)
    assignment, minibatches = partition_rows(ids, weights, dp, n_minibatches)
    bound = max(map(sum, groups), default=0)
    for selected in [{k} for k in range(n_minibatches)] + [set(range(n_minibatches))]:
        loads = [sum(weights[i] for i in part if minibatches[i] in selected) for part in assignment]
        assert max(loads) - min(loads) <= bound


def test_no_divisibility_requirements() -> None:
    ids = [RowId(p, 0) for p in range(3)]
    assert partition_rows(ids, [5, 1, 1], 2, 2) == (((0,), (1, 2)), (0, 0, 1))
    assert partition_rows(ids[:1], [5], 3, 4) == (((0,), (), ()), (0,))
    assert partition_rows([], [], 2, 2) == (((), ()), ())
