"""Counter-based uniforms against integers of Python; drawn tokens against distributions worked out by enumeration."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from realhf.ops.sampling import sample, uniform

WORD = (1 << 64) - 1


def python_uniform(seed, *counters):
    """splitmix64's finaliser on unbounded integers."""

    def mix(x):
        x &= WORD
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & WORD
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & WORD
        return x ^ (x >> 31)

    state = mix(seed + 0x9E3779B97F4A7C15)
    for counter in counters:
        state = mix((state ^ (counter & WORD)) + 0x9E3779B97F4A7C15)
    return (state >> 11) / 2**53


def grid(seed, prompts, samples, positions):
    table = torch.cartesian_prod(torch.arange(prompts), torch.arange(samples), torch.arange(positions))
    return uniform(seed, *table.unbind(-1)).reshape(prompts, samples, positions)


signed = st.integers(-(2**63), 2**63 - 1)


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**64), signed, signed, signed)
def test_uniform_is_the_hash(seed, prompt, row, position):
    got = uniform(seed, *(torch.tensor([c]) for c in (prompt, row, position)))
    assert got.dtype == torch.float64 and 0 <= got.item() < 1
    assert got.item() == python_uniform(seed, prompt, row, position)


def test_uniform_is_uniform():
    counts = torch.histc(grid(7, 20, 10, 500), 100, 0.0, 1.0)
    chi_square = ((counts - 1000) ** 2 / 1000).sum().item()
    assert 60 < chi_square < 150  # 99 degrees of freedom: about 0.1 % beyond on either side


def test_neighbours_and_seeds_are_not_correlated():
    u = grid(3, 40, 40, 40) - 0.5
    pairs = [(u[1:], u[:-1]), (u[:, 1:], u[:, :-1]), (u[..., 1:], u[..., :-1]), (u, grid(4, 40, 40, 40) - 0.5)]
    pairs += [(u, u.transpose(0, 1))]  # the diagonal is the same by construction: 1/40 of the correlation
    for k, (a, b) in enumerate(pairs):
        correlation = ((a * b).mean() * 12).item()
        assert abs(correlation - (1 / 40 if k == 4 else 0)) < 0.02  # about 5 standard deviations
    assert u.unique().numel() == 40**3


def test_the_same_numbers_in_any_batch():
    prompts, samples, positions = torch.randint(0, 1000, (3, 50), generator=torch.Generator().manual_seed(0))
    whole = uniform(1, prompts, samples, positions)
    order = torch.randperm(50, generator=torch.Generator().manual_seed(1))
    assert torch.equal(uniform(1, prompts[order], samples[order], positions[order]), whole[order])
    assert torch.equal(uniform(1, prompts[3:4], samples[3:4], positions[3:4]), whole[3:4])


def distribution(logits, temperature, top_k, top_p, forbid):
    """The distribution by its definition, in floats: token -> probability."""
    left = {i: x / temperature for i, x in enumerate(logits) if i not in forbid}
    ranked = sorted(left, key=lambda i: (-left[i], i))[: top_k or None]
    weights = {i: math.exp(left[i] - left[ranked[0]]) for i in ranked}
    total, mass, kept = sum(weights.values()), 0.0, {}
    for i in ranked:
        if mass / total < top_p - 1e-6:
            kept[i] = weights[i]
        mass += weights[i]
    return {i: w / sum(kept.values()) for i, w in kept.items()}


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.integers(-8, 8), min_size=2, max_size=12),  # ties are common
    st.sampled_from([0.5, 1.0, 2.0]),
    st.integers(0, 14),
    st.sampled_from([0.123, 0.5, 0.87, 1.0]),
    st.sets(st.integers(0, 11), max_size=3),
)
def test_the_distribution_is_exact(whole, temperature, top_k, top_p, forbid):
    logits = [x / 2 for x in whole]
    forbid = {i for i in forbid if 0 < i < len(logits)}
    n = 4000
    u = (torch.arange(n, dtype=torch.float64) + 0.5) / n
    banned = torch.tensor(sorted(forbid), dtype=torch.int64)
    tokens, logprobs, sampling = sample(torch.tensor(logits).expand(n, -1), u, temperature, top_k, top_p, banned)
    want = distribution(logits, temperature, top_k, top_p, forbid)
    full = distribution(logits, temperature, 0, 1.0, ())
    counts = torch.bincount(tokens, minlength=len(logits)).tolist()
    for i, count in enumerate(counts):
        assert count / n == pytest.approx(want.get(i, 0.0), abs=2 / n) and (i in want or count == 0)
    for i in set(tokens.tolist()):
        where = tokens == i
        assert logprobs[where][0].item() == pytest.approx(math.log(full[i]), abs=1e-5)
        assert sampling[where][0].item() == pytest.approx(math.log(want[i]), abs=1e-5)


def test_forbidden_tokens_only_in_the_rows_that_say_so():
    logits = torch.tensor([[9.0, 0.0, 0.0]]).expand(4, -1)
    rows = torch.tensor([True, False, True, False])
    tokens, logprobs, sampling = sample(
        logits, torch.tensor([0.1, 0.1, 0.9, 0.9]), forbid=torch.tensor([0]), forbid_rows=rows
    )
    assert tokens.tolist() == [1, 0, 2, 0]
    assert sampling[0].item() == pytest.approx(math.log(0.5)) and torch.allclose(sampling[1::2], logprobs[1::2])
    assert logprobs[0].item() == pytest.approx(-math.log(2 + math.exp(9)))


def test_greedy_takes_the_lowest_of_equal_tokens():
    logits = torch.tensor([[1.0, 3.0, 3.0], [5.0, 1.0, 2.0]])
    forbid = torch.tensor([0])
    tokens, logprobs, sampling = sample(logits, torch.rand(2), 0.0, 1, 0.1, forbid)
    assert tokens.tolist() == [1, 2] and sampling.tolist() == [0.0, 0.0]
    assert torch.allclose(logprobs, logits.log_softmax(-1)[[0, 1], [1, 2]])


@pytest.mark.parametrize("u", [0.0, 1.0 - 2**-53, 1.0])
def test_never_a_token_of_probability_zero(u):
    inf = float("inf")
    logits = torch.tensor([[-inf, 1.0, -200.0, 0.0, -inf]])
    for top_k, top_p in ((0, 1.0), (3, 1.0), (0, 0.99), (5, 1.0)):
        tokens, _, sampling = sample(logits, torch.tensor([u], dtype=torch.float64), 1.0, top_k, top_p)
        assert tokens.item() in (1, 3) and torch.isfinite(sampling).all()


def test_a_row_draws_the_same_in_any_batch():
    generator = torch.Generator().manual_seed(0)
    logits, u = torch.randn(6, 50, generator=generator), torch.rand(6, generator=generator)
    for top_k, top_p in ((0, 1.0), (5, 1.0), (0, 0.7), (20, 0.7)):
        whole = sample(logits, u, 0.8, top_k, top_p)[0]
        assert all(sample(logits[i : i + 1], u[i : i + 1], 0.8, top_k, top_p)[0] == whole[i] for i in range(6))


@pytest.mark.parametrize("wrong", [(-1.0, 0, 1.0), (1.0, -1, 1.0), (1.0, 0, 0.0), (1.0, 0, 1.5)])
def test_options_out_of_range_are_refused(wrong):
    with pytest.raises(ValueError, match="need temperature"):
        sample(torch.zeros(1, 3), torch.zeros(1), *wrong)
