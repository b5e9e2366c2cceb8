"""Pairs of rows and of sampled responses."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from realhf.algorithms.preference.pairs import build_pairs, pairs_of, ranked_pairs
from realhf.api.batch_meta import RowId


def test_pairs_of_row_ids():
    ids = tuple(RowId(1, s) for s in (3, 0, 2, 1)) + (RowId(0, 1), RowId(0, 0))
    pairs = pairs_of(ids)
    assert (pairs.better, pairs.worse, pairs.weights) == ([1, 2, 5], [3, 0, 4], [0.5, 0.5, 1.0])
    with pytest.raises(ValueError, match="sample 0 of prompt 3 has no pair"):
        pairs_of((RowId(3, 0), RowId(4, 1)))


def test_ranked_list_gives_all_pairs():
    ids = (RowId(7, 2), RowId(4, 0), RowId(7, 0), RowId(4, 1), RowId(7, 1), RowId(5, 0))
    pairs = ranked_pairs(ids)
    weights = dict(zip(zip(pairs.better, pairs.worse, strict=True), pairs.weights, strict=True))
    assert weights == {(2, 4): 1 / 3, (2, 0): 1 / 3, (4, 0): 1 / 3, (1, 3): 1.0} and len(pairs.better) == 4


def test_all_combinations_of_right_and_wrong():
    assert build_pairs([False, True, True, False], 8, seed=1) == [(1, 0), (1, 3), (2, 0), (2, 3)]
    assert build_pairs([True, True], 8, 1) == build_pairs([False], 8, 1) == build_pairs([], 8, 1) == []
    with pytest.raises(ValueError, match="max_pairs must be positive, got 0"):
        build_pairs([True, False], 0, 1)


@given(st.lists(st.booleans(), max_size=12), st.integers(1, 40), st.integers(0, 99))
def test_pairs_are_right_wrong_distinct_and_at_most_max_pairs(right, max_pairs, seed):
    pairs = build_pairs(right, max_pairs, seed)
    assert len(set(pairs)) == len(pairs) == min(max_pairs, sum(right) * (len(right) - sum(right)))
    assert all(right[good] and not right[bad] for good, bad in pairs)
    assert pairs == build_pairs(right, max_pairs, seed)


def test_sampled_pairs_depend_on_the_seed():
    right = [i % 2 == 0 for i in range(20)]
    assert len({tuple(build_pairs(right, 5, seed)) for seed in range(5)}) == 5
