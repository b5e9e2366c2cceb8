"""Partition of rows over data-parallel ranks and mini-batches; micro-batches are within the token budget."""

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from realhf.api.batch_meta import RowId
from realhf.api.execution_plan import MicroBatching
from realhf.plan.compile.micro_batch import micro_batches, partition_rows
from tests.scaling import examples

ROWS = st.lists(st.tuples(st.integers(0, 6), st.integers(1, 40)), max_size=30)
GROUPS = st.lists(st.lists(st.integers(0, 99), min_size=1, max_size=4), max_size=12)
SMALL = st.integers(1, 5)


@given(rows=ROWS, n_mbs=st.integers(1, 7), budget=st.integers(1, 120), whole=st.booleans())
@settings(max_examples=examples(50))
def test_micro_batches(rows: list[tuple[int, int]], n_mbs: int, budget: int, whole: bool) -> None:
    ids = [RowId(prompt, i) for i, (prompt, _) in enumerate(rows)]
    lengths = [length for _, length in rows]
    parts = micro_batches(ids, lengths, MicroBatching(n_mbs, budget), whole)
    assert sorted(i for part in parts for i in part) == list(range(len(rows)))
    assert all(parts)
    groups = {row.prompt for row in ids} if whole else set(ids)
    assert len(parts) >= min(n_mbs, len(groups))
    for part in parts:
        assert [lengths[i] for i in part] == sorted(lengths[i] for i in part)
        inside = {ids[i].prompt if whole else ids[i] for i in part}
        assert sum(lengths[i] for i in part) <= budget or len(inside) == 1
    if whole:
        owners = [{ids[i].prompt for i in part} for part in parts]
        assert sum(map(len, owners)) == len(groups)


@given(rows=ROWS, n_mbs=st.integers(1, 7), budget=st.integers(1, 120), stages=st.integers(1, 5), whole=st.booleans())
@settings(max_examples=examples(50))
def test_numbers_of_micro_batches_are_multiples_of_the_stages(
    rows: list[tuple[int, int]], n_mbs: int, budget: int, stages: int, whole: bool
) -> None:
    ids = [RowId(prompt, i) for i, (prompt, _) in enumerate(rows)]
    lengths, limits = [length for _, length in rows], MicroBatching(n_mbs, budget)
    parts = micro_batches(ids, lengths, limits, whole, multiple_of=stages)
    n_groups = len({row.prompt for row in ids} if whole else ids)
    assert sorted(i for part in parts for i in part) == list(range(len(rows))) and all(parts)
    assert len(parts) % stages == 0 or len(parts) // stages * stages + stages > n_groups
    plain = micro_batches(ids, lengths, limits, whole)
    assert len(plain) <= len(parts) and (parts == plain or len(plain) % stages)
    if not whole:
        assert all(sum(lengths[i] for i in part) <= budget or len(part) == 1 for part in parts)


def test_micro_batches_depend_only_on_lengths() -> None:
    lengths = [5, 3, 9, 3, 1]
    ids = [RowId(p, 0) for p in range(5)]
    others = [RowId(p + 70, 2) for p in range(5)]
    limits = MicroBatching(2, 10)
    assert micro_batches(ids, lengths, limits) == micro_batches(others, lengths, limits)
    assert micro_batches([], [], limits) == []


@given(rows=ROWS, n_mbs=st.integers(1, 7), budget=st.integers(1, 120))
@settings(max_examples=examples(50))
def test_prompts_stay_together_within_the_limits(rows: list[tuple[int, int]], n_mbs: int, budget: int) -> None:
    ids = [RowId(prompt, i) for i, (prompt, _) in enumerate(rows)]
    lengths = [length for _, length in rows]
    parts = micro_batches(ids, lengths, MicroBatching(n_mbs, budget), prefer_prompts_together=True)
    assert sorted(i for part in parts for i in part) == list(range(len(rows)))
    assert len(parts) >= min(n_mbs, len(rows))
    for part in parts:
        assert sum(lengths[i] for i in part) <= budget or len(part) == 1
    if n_mbs == 1 and sum(lengths) <= budget:
        assert len(parts) == min(1, len(rows))


def test_a_group_that_fits_is_not_split() -> None:
    ids = [RowId(prompt, sample) for sample in range(4) for prompt in range(3)]
    parts = micro_batches(ids, [5] * 12, MicroBatching(3, 25), prefer_prompts_together=True)
    assert sorted(sorted({ids[i].prompt for i in part}) for part in parts) == [[0], [1], [2]]


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
