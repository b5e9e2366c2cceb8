"""Advantages of kernels and reference implementations against loops and a worked example."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from realhf.ops import extension
from realhf.ops.gae import (
    gae_1d_nolp_misalign,
    gae_2d_nolp,
    gae_2d_olp,
    gae_2d_reference,
    packed_gae,
    packed_gae_reference,
)
from tests.scaling import examples

both = pytest.mark.parametrize("gae", [packed_gae, packed_gae_reference])


def loops(rewards, values, lengths, bootstrap, gamma, lam):
    """Compute the definition one token at a time in Python floats."""
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
@settings(max_examples=examples(50))
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
    result = gae(rewards, values, lengths, torch.tensor(cut, dtype=torch.bool), gamma, lam)
    expected = loops(rewards.tolist(), values.tolist(), lengths, cut, gamma, lam)
    for a, b in zip(result, expected, strict=True):
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
def test_without_values_and_discount_the_return_is_the_sum_of_future_rewards(gae):
    advantages, returns = gae(
        torch.tensor([0.0, 1, 2, 4, 0, 8]), torch.zeros(6), (4, 2), torch.tensor([True, False]), 1.0, 1.0
    )
    assert advantages.tolist() == returns.tolist() == [0, 7, 6, 4, 0, 8]


@both
def test_rows_are_independent_and_arguments_unchanged(gae):
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
def test_invalid_lengths_are_errors(gae, lengths):
    with pytest.raises(ValueError, match="do not sum to the 3 values"):
        gae(torch.zeros(3), torch.zeros(3), lengths, torch.zeros(2, dtype=torch.bool), 1.0, 1.0)


@both
@pytest.mark.parametrize(("rewards", "values", "cut"), [(1, (3,), 2), (3, (3, 1), 2), (3, (3,), 1)])
def test_invalid_shapes_are_errors(gae, rewards, values, cut):
    with pytest.raises(ValueError, match=r"must be \[B\] with 2 rows"):
        gae(torch.zeros(rewards), torch.zeros(values), (1, 2), torch.zeros(cut, dtype=torch.bool), 1.0, 1.0)


def misaligned_loops(rewards, values, lengths, bootstrap, gamma, lam):
    """Compute rows with one more value than actions."""
    advantages, returns, at = [], [], 0
    for row, (n, cut) in enumerate(zip(lengths, bootstrap, strict=True)):
        r, v = rewards[at : at + n], values[at + row : at + row + n + 1]
        later, of_row = 0.0, [0.0] * n
        for t in range(n - 1, -1, -1):
            after = v[t + 1] if t < n - 1 or cut else 0.0
            of_row[t] = later = r[t] + gamma * after - v[t] + gamma * lam * later
        advantages += of_row
        returns += [a + b for a, b in zip(of_row, v, strict=False)]
        at += n
    return advantages, returns


@settings(max_examples=examples(30))
@given(st.lists(st.tuples(st.integers(0, 9), st.booleans()), max_size=6), st.floats(0, 1), st.floats(0, 1))
def test_rows_with_one_more_value_than_actions(rows, gamma, lam):
    lengths, cut = [n for n, _ in rows], [c for _, c in rows]
    rewards = torch.randn(sum(lengths), generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    values = torch.randn(sum(lengths) + len(rows), generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    result = gae_1d_nolp_misalign(rewards, values, lengths, torch.tensor(cut, dtype=torch.bool), gamma, lam)
    for a, b in zip(result, misaligned_loops(rewards.tolist(), values.tolist(), lengths, cut, gamma, lam), strict=True):
        assert a.tolist() == pytest.approx(b, abs=1e-10)


def slots(n_slots, n_steps, seed, dtype=torch.float64):
    """Return random rewards, values, end flags and truncation flags."""
    generator = torch.Generator().manual_seed(seed)
    rewards = torch.randn(n_slots, n_steps, generator=generator, dtype=torch.float64).to(dtype)
    values = torch.randn(n_slots, n_steps + 1, generator=generator, dtype=torch.float64).to(dtype)
    ends, cuts = torch.rand(2, n_slots, n_steps + 1, generator=generator) < 0.3
    return rewards, values, ends, cuts


def olp_loops(r, v, done, cut, gamma, lam):
    """Compute one slot without final observations."""
    advantages, later = [0.0] * len(r), 0.0
    for t in range(len(r) - 1, -1, -1):
        if cut[t + 1]:
            later = 0.0
        elif done[t + 1]:
            later = r[t] - v[t]
        else:
            later = r[t] + gamma * v[t + 1] - v[t] + gamma * lam * later
        advantages[t] = later
    return advantages


def nolp_loops(r, v, reset, cut, gamma, lam):
    """Compute one slot with final observations."""
    advantages, later = [0.0] * len(r), 0.0
    for t in range(len(r) - 1, -1, -1):
        link = gamma * lam * (1 - reset[t + 1]) * (1 - cut[t + 1])
        later = r[t] + gamma * v[t + 1] * (1 - reset[t + 1]) - v[t] + link * later
        advantages[t] = later
    return advantages


@pytest.mark.parametrize("overlap", [True, False])
@settings(max_examples=examples(40))
@given(st.integers(0, 4), st.integers(0, 40), st.floats(0, 1), st.floats(0, 1), st.integers(0, 2**31))
def test_slots_agree_with_the_definition(overlap, n_slots, n_steps, gamma, lam, seed):
    rewards, values, ends, cuts = slots(n_slots, n_steps, seed)
    cuts = cuts & ends if overlap else cuts
    loop = olp_loops if overlap else nolp_loops
    given_lists = zip(rewards.tolist(), values.tolist(), ends.tolist(), cuts.tolist(), strict=True)
    expected = [loop(*one, gamma, lam) for one in given_lists]
    dispatched = (gae_2d_olp if overlap else gae_2d_nolp)(rewards, values, ends, cuts, gamma, lam)
    for advantages, returns in (dispatched, gae_2d_reference(rewards, values, ends, cuts, gamma, lam, overlap)):
        for a, b in zip(advantages.tolist(), expected, strict=True):
            assert a == pytest.approx(b, abs=1e-10)
        assert torch.allclose(returns, advantages + values[:, :-1], rtol=0, atol=1e-12)


def test_a_slot_with_final_observations_matches_packed_rows():
    # three actions and an end, two actions and a cut: rewards and, at a finished end, values of last steps are 0
    rewards = torch.tensor([[1.0, 2, 3, 0, 4, 5, 0]])
    values = torch.tensor([[10.0, 20, 30, 0, 40, 50, 60, 7]])
    resets = torch.tensor([[1, 0, 0, 0, 1, 0, 0, 1]]).bool()
    cuts = torch.tensor([[0, 0, 0, 0, 0, 0, 1, 0]]).bool()
    result = gae_2d_nolp(rewards, values, resets, cuts, 0.9, 0.8)
    of_rows = (torch.tensor([1.0, 2, 3, 4, 5]), values[0, :7], (3, 2), torch.tensor([False, True]), 0.9, 0.8)
    for a, b in zip(result, gae_1d_nolp_misalign(*of_rows), strict=True):
        torch.testing.assert_close(a[0, [0, 1, 2, 4, 5]], b)


def test_slots_are_bitwise_independent_of_threads_and_other_slots():
    given_slots = slots(50, 1001, 3, torch.float32)
    threads, results = torch.get_num_threads(), []
    try:
        for n in (1, 3):
            torch.set_num_threads(n)
            results.append(gae_2d_nolp(*given_slots, 0.99, 0.95))
    finally:
        torch.set_num_threads(threads)
    alone = gae_2d_nolp(*(x[7:8] for x in given_slots), 0.99, 0.95)
    for k in (0, 1):
        assert torch.equal(results[0][k], results[1][k]) and torch.equal(results[0][k][7:8], alone[k])
    expected = gae_2d_reference(
        *(x.double() if x.dtype == torch.float32 else x for x in given_slots), 0.99, 0.95, False
    )
    torch.testing.assert_close(results[0][0].double(), expected[0], rtol=0, atol=1e-5)


def test_slots_support_gradients_and_other_dtypes_through_the_reference():
    rewards, values, ends, cuts = slots(2, 5, 0)
    values.requires_grad_()
    gae_2d_olp(rewards, values, ends, cuts, 0.9, 0.8)[0].sum().backward()
    assert values.grad is not None
    assert gae_2d_nolp(rewards.bfloat16(), values.detach().bfloat16(), ends, cuts, 0.9, 0.8)[0].dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"values": torch.zeros(2, 3)}, r"values \[2, 3\]"),
        ({"rewards": torch.zeros(3)}, r"rewards \[3\] must be \[B, T\]"),
        ({"truncates": torch.zeros(1, 4).bool()}, r"truncates \[1, 4\] \[B, T\+1\]"),
        ({"dones": torch.zeros(2, 4)}, "must be bool"),
    ],
)
def test_invalid_slots_are_errors(wrong, message):
    fitting = {
        "rewards": torch.zeros(2, 3),
        "values": torch.zeros(2, 4),
        "dones": torch.zeros(2, 4).bool(),
        "truncates": torch.zeros(2, 4).bool(),
    }
    gae_2d_olp(**fitting, gamma=1.0, lam=1.0)
    with pytest.raises(ValueError, match=message):
        gae_2d_olp(**{**fitting, **wrong}, gamma=1.0, lam=1.0)


def test_the_kernel_of_slots_passes_opcheck():
    kernel = extension.kernel("gae_2d", "cpu")
    if kernel is None:
        pytest.skip("NATIVE KERNELS NOT BUILT")
    torch.library.opcheck(kernel, (*slots(2, 9, 0), 0.9, 0.8, True))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("overlap", [True, False])
def test_cuda_slots_match_the_cpu_reference(overlap):
    for n_slots, n_steps in ((1, 1), (5, 31), (6, 32), (7, 1000), (3, 0)):
        on_cpu = slots(n_slots, n_steps, 1)
        result = (gae_2d_olp if overlap else gae_2d_nolp)(*(x.cuda() for x in on_cpu), 0.99, 0.95)
        for a, b in zip(result, gae_2d_reference(*on_cpu, 0.99, 0.95, overlap), strict=True):
            torch.testing.assert_close(a.cpu(), b, rtol=0, atol=1e-12)
