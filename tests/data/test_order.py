"""The stream of rows depends only on the seed and the position."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from realhf.data.order import epoch_order, resampled_at, rows_at
from tests.scaling import examples

SEEDS = st.integers(0, 2**40)
SIZES = st.integers(1, 40)


@settings(max_examples=examples(50))
@given(SEEDS, st.integers(0, 100), SIZES, st.booleans())
def test_every_epoch_is_a_permutation(seed: int, epoch: int, n: int, shuffle: bool) -> None:
    assert sorted(epoch_order(seed, epoch, n, shuffle)) == list(range(n))


@settings(max_examples=examples(50))
@given(SEEDS, SIZES, st.lists(st.integers(0, 200), min_size=3, max_size=3), st.booleans())
def test_a_range_may_be_split_anywhere(seed: int, n: int, bounds: list[int], shuffle: bool) -> None:
    start, middle, stop = sorted(bounds)
    whole = rows_at(seed, n, start, stop, shuffle)
    assert whole == rows_at(seed, n, start, middle, shuffle) + rows_at(seed, n, middle, stop, shuffle)
    assert whole == [int(epoch_order(seed, i // n, n, shuffle)[i % n]) for i in range(start, stop)]


@settings(max_examples=examples(50))
@given(SEEDS, SIZES, st.integers(0, 9), st.integers(1, 9), st.lists(st.integers(0, 60), min_size=3, max_size=3))
def test_replacement_rows_exclude_own_rows(seed: int, n: int, step: int, size: int, bounds: list[int]) -> None:
    start, middle, stop = sorted(bounds)
    own = rows_at(seed, n, step * size, (step + 1) * size, True)
    rows = resampled_at(seed, n, step, own, start, stop)
    assert rows == resampled_at(seed, n, step, own, start, middle) + resampled_at(seed, n, step, own, middle, stop)
    n_others = n - len(set(own))
    assert len(set(resampled_at(seed, n, step, own, 0, n_others))) == n_others
    assert not set(rows) & set(own) or n_others == 0


def test_epochs_and_seeds_differ_unless_rows_are_not_shuffled() -> None:
    orders = [tuple(epoch_order(seed, epoch, 30, True)) for seed in (1, 2) for epoch in (0, 1)]
    assert len(set(orders)) == 4
    assert rows_at(1, 3, 0, 7, shuffle=False) == [0, 1, 2, 0, 1, 2, 0]


def test_negative_positions_are_an_error() -> None:
    with pytest.raises(ValueError, match="positions -1:2"):
        rows_at(1, 3, -1, 2, True)
