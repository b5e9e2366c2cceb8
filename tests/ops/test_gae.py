"""Advantages, dispatched and plain, against loops and against the layout of L-1 actions worked out by hand."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from realhf.ops.gae import packed_gae, packed_gae_reference

both = pytest.mark.parametrize("gae", [packed_gae, packed_gae_reference])


def loops(rewards, values, lengths, bootstrap, gamma, lam):
    """The definition, one token at a time, in floats."""
    advantages, returns, start = [], [], 0
    for n, cut in zip(lengths, bootstrap, strict=True):
        r, v = rewards[start : start + n], values[start : start + n]
        row_a, row_r, later = [0.0] * n, [0.0] * n, 0.0
        for t in range(n - 1, 0, -1):
            value_after = v[t] if t < n - 1 or cut else 0.0
            later = r[t] + gamma * value_after - v[t - 1] + gamma * lam * later
            row_a[t], row_r[t] = later, later + v[t - 1]
        advantages, returns, start = advantages + row_a, returns + row_r, start + n
    return advantages, returns


@both
@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 19), st.booleans()), max_size=6),
    st.floats(0, 1),
    st.floats(0, 1),
    st.integers(0, 2**31),
)
def test_agrees_with_the_definition(gae, rows, gamma, lam, seed):
    lengths, cut = tuple(n for n, _ in rows), [c for _, c in rows]
    generator = torch.Generator().manual_seed(seed)
    rewards, values = torch.randn(2, sum(lengths), generator=generator, dtype=torch.float64)
    got = gae(rewards, values, lengths, torch.tensor(cut, dtype=torch.bool), gamma, lam)
    want = loops(rewards.tolist(), values.tolist(), lengths, cut, gamma, lam)
    for a, b in zip(got, want, strict=True):
        assert a.tolist() == pytest.approx(b, abs=1e-10)


@both
@pytest.mark.parametrize("cut", [False, True])
def test_the_layout_of_l_minus_1_actions_by_hand(gae, cut):
    # L=4 tokens, 3 actions: r' = (1, 2, 3), V' = (10, 20, 30, 40 or 0), gamma 0.5, lambda 0.5
    last = 40.0 if cut else 0.0
    d3 = 3 + 0.5 * last - 30
    d2 = 2 + 0.5 * 30 - 20 + 0.25 * d3
    d1 = 1 + 0.5 * 20 - 10 + 0.25 * d2
    rewards, values = torch.tensor([99.0, 1, 2, 3]), torch.tensor([10.0, 20, 30, 40])
    advantages, returns = gae(rewards, values, (4,), torch.tensor([cut]), 0.5, 0.5)
    assert advantages.tolist() == [0, d1, d2, d3]
    assert returns.tolist() == [0, d1 + 10, d2 + 20, d3 + 30]


@both
def test_without_values_and_discount_the_return_is_what_is_still_to_come(gae):
    advantages, returns = gae(
        torch.tensor([0.0, 1, 2, 4, 0, 8]), torch.zeros(6), (4, 2), torch.tensor([True, False]), 1.0, 1.0
    )
    assert advantages.tolist() == returns.tolist() == [0, 7, 6, 4, 0, 8]


@both
def test_a_row_does_not_depend_on_its_company_and_nothing_is_changed(gae):
    generator = torch.Generator().manual_seed(0)
    rewards, values = torch.randn(2, 40, generator=generator)
    kept = rewards.clone(), values.clone()
    bootstrap = torch.tensor([True, True, False])
    together = gae(rewards, values, (7, 30, 3), bootstrap, 0.99, 0.95)
    alone = gae(rewards[7:37], values[7:37], (30,), bootstrap[1:2], 0.99, 0.95)
    assert together[0].dtype == torch.float32
    for a, b in zip(together, alone, strict=True):
        assert torch.equal(a[7:37], b)
    assert torch.equal(rewards, kept[0]) and torch.equal(values, kept[1])


@both
def test_no_rows(gae):
    empty = torch.zeros(0)
    assert [x.numel() for x in gae(empty, empty, (), torch.zeros(0, dtype=torch.bool), 1.0, 1.0)] == [0, 0]


@both
@pytest.mark.parametrize("lengths", [(2, 2), (0, 3)])
def test_lengths_that_do_not_fit_are_refused(gae, lengths):
    with pytest.raises(ValueError, match="do not make 3 values"):
        gae(torch.zeros(3), torch.zeros(3), lengths, torch.zeros(2, dtype=torch.bool), 1.0, 1.0)


@both
@pytest.mark.parametrize(("rewards", "values", "cut"), [(1, (3,), 2), (3, (3, 1), 2), (3, (3,), 1)])
def test_shapes_that_do_not_fit_are_refused(gae, rewards, values, cut):
    with pytest.raises(ValueError, match=r"must be \[B\] with 2 rows"):
        gae(torch.zeros(rewards), torch.zeros(values), (1, 2), torch.zeros(cut, dtype=torch.bool), 1.0, 1.0)
