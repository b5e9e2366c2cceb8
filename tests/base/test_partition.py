"""Balanced partitions and bin packing."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from realhf.base.partition import balanced_partition, pack_bins
from tests.scaling import examples

WEIGHTS = st.lists(st.integers(0, 50), max_size=40)


def loads(parts: list[list[int]], weights: list[int]) -> list[int]:
    return [sum(weights[i] for i in part) for part in parts]


@settings(max_examples=examples(50))
@given(WEIGHTS, st.integers(1, 9))
def test_parts_cover_all_items_once_and_differ_by_at_most_one_item(weights: list[int], k: int) -> None:
    parts = balanced_partition(weights, k)
    assert len(parts) == k and sorted(i for part in parts for i in part) == list(range(len(weights)))
    assert all(part == sorted(part) for part in parts)
    assert max(loads(parts, weights)) - min(loads(parts, weights)) <= max(weights, default=0)
    assert balanced_partition(weights, k) == parts


def test_equal_weights_are_distributed_evenly() -> None:
    assert balanced_partition([0] * 5, 2) == [[0, 2, 4], [1, 3]]
    assert balanced_partition([7] * 3, 5) == [[0], [1], [2], [], []]
    with pytest.raises(ValueError, match="0 parts"):
        balanced_partition([1], 0)


@settings(max_examples=examples(50))
@given(WEIGHTS, st.integers(1, 120), st.integers(1, 9))
def test_bins_respect_the_capacity_and_the_minimum_number(weights: list[int], capacity: int, min_bins: int) -> None:
    bins = pack_bins(weights, capacity, min_bins)
    assert sorted(i for part in bins for i in part) == list(range(len(weights)))
    assert all(bins) and all(part == sorted(part) for part in bins)
    assert len(bins) >= min(min_bins, len(weights))
    assert all(load <= max(capacity, *weights) for load in loads(bins, weights))


@settings(max_examples=examples(50))
@given(WEIGHTS, st.integers(50, 120))
def test_first_fit_wastes_less_than_half(weights: list[int], capacity: int) -> None:
    assert len(pack_bins(weights, capacity)) <= 2 * sum(weights) // capacity + 1


def test_a_minimum_above_the_needed_number_of_bins_respects_the_capacity() -> None:
    # the classic worst case of longest-first: twenty balanced parts would reach 79
    weights = [w for w in range(20, 40) for _ in (0, 1)] + [20]
    assert len(pack_bins(weights, 70)) == 19
    bins = pack_bins(weights, 70, 20)
    assert len(bins) >= 20 and max(loads(bins, weights)) <= 70


def test_an_item_over_the_capacity_has_its_own_bin() -> None:
    assert pack_bins([3, 9, 2], 5) == [[1], [0, 2]]
    assert pack_bins([], 5, 3) == []
    with pytest.raises(ValueError, match="capacity must be positive, got 0"):
        pack_bins([1], 0)
