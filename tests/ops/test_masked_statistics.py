"""Masked statistics against Python's, and their sums over parts."""

import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from realhf.ops.rows import group_normalise, masked_sums, normalise
from tests.scaling import examples


def by_hand(values, mask):
    kept = [x for x, m in zip(values, mask, strict=True) if m]
    mean, std = (statistics.fmean(kept), statistics.pstdev(kept)) if kept else (0.0, 0.0)
    return [(x - mean) / (std + 1e-5) if m else 0.0 for x, m in zip(values, mask, strict=True)]


pairs = st.lists(st.tuples(st.floats(-100, 100), st.booleans()), min_size=1, max_size=30)


@settings(max_examples=examples(50))
@given(pairs, st.integers(0, 30))
def test_normalise_with_sums_added_over_two_parts(rows, cut):
    x = torch.tensor([a for a, _ in rows], dtype=torch.float64)
    mask = torch.tensor([b for _, b in rows])
    sums = masked_sums(x[:cut], mask[:cut]) + masked_sums(x[cut:], mask[cut:])
    assert sums.dtype == torch.float64
    assert normalise(x, mask.byte(), sums).tolist() == pytest.approx(by_hand(x.tolist(), mask.tolist()), abs=1e-4)


def test_masked_positions_are_zero_even_where_the_input_is_not_finite():
    x, mask = torch.tensor([1.0, float("nan"), 3.0]), torch.tensor([1, 0, 1], dtype=torch.uint8)
    assert masked_sums(x, mask).tolist() == [4, 10, 2]
    assert normalise(x, mask, masked_sums(x, mask)).tolist() == pytest.approx([-1, 0, 1], abs=1e-4)


def test_one_value_and_no_value():
    x = torch.tensor([5.0, 7.0])
    assert normalise(x, torch.tensor([True, False]), masked_sums(x, torch.tensor([True, False]))).tolist() == [0, 0]
    assert normalise(x, torch.zeros(2), masked_sums(x, torch.zeros(2))).tolist() == [0, 0]


@settings(max_examples=examples(30))
@given(st.lists(st.tuples(st.integers(1, 5), st.integers(0, 3)), max_size=8), st.integers(0, 1000))
def test_groups_are_normalised_on_their_own(rows, seed):
    lengths, groups = [n for n, _ in rows], [g * 7 for _, g in rows]
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(sum(lengths), generator=generator)
    mask = torch.rand(sum(lengths), generator=generator) < 0.7
    token_group = [g for n, g in zip(lengths, groups, strict=True) for _ in range(n)]
    expected = torch.zeros(len(x))
    for g in set(groups):
        where = [i for i, other in enumerate(token_group) if other == g]
        expected[where] = torch.tensor(by_hand(x[where].tolist(), mask[where].tolist()))
    assert torch.allclose(group_normalise(x, mask, lengths, groups), expected, atol=1e-3)
