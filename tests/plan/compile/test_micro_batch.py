"""Micro-batches are a partition within the token budget, sorted by length."""

from hypothesis import given, settings
from hypothesis import strategies as st

from realhf.api.batch_meta import RowId
from realhf.api.execution_plan import MicroBatching
from realhf.plan.compile.micro_batch import micro_batches
from tests.scaling import examples

ROWS = st.lists(st.tuples(st.integers(0, 6), st.integers(1, 40)), max_size=30)


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
