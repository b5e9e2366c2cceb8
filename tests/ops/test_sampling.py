"""Counter-based uniforms against Python integers; sampled tokens against enumerated distributions."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from realhf.ops import extension
from realhf.ops.sampling import NO_TOKEN, sample, sample_reference, uniform, uniform_reference
from tests.scaling import examples

both = pytest.mark.parametrize("draw", [sample, sample_reference])

WORD = (1 << 64) - 1


def python_uniform(seed, *counters):
    """Compute splitmix64's finaliser on Python integers."""

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


@settings(max_examples=examples(50))
@given(st.integers(0, 2**64), signed, signed, signed)
def test_uniform_is_the_hash(seed, prompt, row, position):
    for hashed in (uniform, uniform_reference):
        result = hashed(seed, *(torch.tensor([c]) for c in (prompt, row, position)))
        assert result.dtype == torch.float64 and 0 <= result.item() < 1
        assert result.item() == python_uniform(seed, prompt, row, position)


def test_uniform_is_uniform():
    counts = torch.histc(grid(7, 20, 10, 500), 100, 0.0, 1.0)
    chi_square = ((counts - 1000) ** 2 / 1000).sum().item()
    assert 60 < chi_square < 150  # 99 degrees of freedom: about 0.1 % beyond on either side


def test_adjacent_counters_and_seeds_are_uncorrelated():
    u = grid(3, 40, 40, 40) - 0.5
    pairs = [(u[1:], u[:-1]), (u[:, 1:], u[:, :-1]), (u[..., 1:], u[..., :-1]), (u, grid(4, 40, 40, 40) - 0.5)]
    pairs += [(u, u.transpose(0, 1))]  # the diagonal is the same by construction: 1/40 of the correlation
    for k, (a, b) in enumerate(pairs):
        correlation = ((a * b).mean() * 12).item()
        assert abs(correlation - (1 / 40 if k == 4 else 0)) < 0.02  # about 5 standard deviations
    assert u.unique().numel() == 40**3


def test_uniforms_do_not_depend_on_the_batch():
    prompts, samples, positions = torch.randint(0, 1000, (3, 50), generator=torch.Generator().manual_seed(0))
    whole = uniform(1, prompts, samples, positions)
    order = torch.randperm(50, generator=torch.Generator().manual_seed(1))
    assert torch.equal(uniform(1, prompts[order], samples[order], positions[order]), whole[order])
    assert torch.equal(uniform(1, prompts[3:4], samples[3:4], positions[3:4]), whole[3:4])


def distribution(logits, temperature, top_k, top_p, forbid):
    """Return the distribution by its definition: token -> probability."""
    left = {i: x / temperature for i, x in enumerate(logits) if i not in forbid}
    ranked = sorted(left, key=lambda i: (-left[i], i))[: top_k or None]
    weights = {i: math.exp(left[i] - left[ranked[0]]) for i in ranked}
    total, mass, kept = sum(weights.values()), 0.0, {}
    for i in ranked:
        if top_p == 1.0 or mass / total < top_p - 1e-6:
            kept[i] = weights[i]
        mass += weights[i]
    return {i: w / sum(kept.values()) for i, w in kept.items()}


@both
@settings(max_examples=examples(50))
@given(
    st.lists(st.integers(-8, 8), min_size=2, max_size=12),  # ties are common
    st.sampled_from([0.5, 1.0, 2.0]),
    st.integers(0, 14),
    st.sampled_from([0.123, 0.5, 0.87, 1.0]),
    st.sets(st.integers(0, 11), max_size=3),
)
def test_the_distribution_is_exact(draw, whole, temperature, top_k, top_p, forbid):
    logits = [x / 2 for x in whole]
    forbid = {i for i in forbid if 0 < i < len(logits)}
    n = 4000
    u = (torch.arange(n, dtype=torch.float64) + 0.5) / n
    banned = torch.tensor(sorted(forbid), dtype=torch.int64)
    tokens, logprobs, sampling = draw(torch.tensor(logits).expand(n, -1), u, temperature, top_k, top_p, banned)
    expected = distribution(logits, temperature, top_k, top_p, forbid)
    full = distribution(logits, temperature, 0, 1.0, ())
    counts = torch.bincount(tokens, minlength=len(logits)).tolist()
    for i, count in enumerate(counts):
        assert count / n == pytest.approx(expected.get(i, 0.0), abs=2 / n) and (i in expected or count == 0)
    for i in set(tokens.tolist()):
        where = tokens == i
        assert logprobs[where][0].item() == pytest.approx(math.log(full[i]), abs=1e-5)
        assert sampling[where][0].item() == pytest.approx(math.log(expected[i]), abs=1e-5)


@both
def test_tokens_are_forbidden_only_in_forbid_rows(draw):
    logits = torch.tensor([[9.0, 0.0, 0.0]]).expand(4, -1)
    rows = torch.tensor([True, False, True, False])
    tokens, logprobs, sampling = draw(
        logits, torch.tensor([0.1, 0.1, 0.9, 0.9]), forbid=torch.tensor([0]), forbid_rows=rows
    )
    assert tokens.tolist() == [1, 0, 2, 0]
    assert sampling[0].item() == pytest.approx(math.log(0.5)) and torch.allclose(sampling[1::2], logprobs[1::2])
    assert logprobs[0].item() == pytest.approx(-math.log(2 + math.exp(9)))


@both
def test_greedy_ties_go_to_the_lowest_id(draw):
    logits = torch.tensor([[1.0, 3.0, 3.0], [5.0, 1.0, 2.0]])
    forbid = torch.tensor([0])
    tokens, logprobs, sampling = draw(logits, torch.rand(2), 0.0, 1, 0.1, forbid)
    assert tokens.tolist() == [1, 2] and sampling.tolist() == [0.0, 0.0]
    assert torch.allclose(logprobs, logits.log_softmax(-1)[[0, 1], [1, 2]])


@both
@pytest.mark.parametrize("u", [0.0, 1.0 - 2**-53, 1.0])
def test_tokens_of_probability_zero_are_never_sampled(draw, u):
    inf = float("inf")
    logits = torch.tensor([[-inf, 1.0, -200.0, 0.0, -inf]])
    for top_k, top_p in ((0, 1.0), (3, 1.0), (0, 0.99), (5, 1.0)):
        tokens, _, sampling = draw(logits, torch.tensor([u], dtype=torch.float64), 1.0, top_k, top_p)
        assert tokens.item() in (1, 3) and torch.isfinite(sampling).all()


@both
def test_a_row_samples_the_same_token_in_any_batch(draw):
    generator = torch.Generator().manual_seed(0)
    logits, u = torch.randn(6, 50, generator=generator), torch.rand(6, generator=generator)
    for top_k, top_p in ((0, 1.0), (5, 1.0), (0, 0.7), (20, 0.7)):
        whole = draw(logits, u, 0.8, top_k, top_p)[0]
        assert all(draw(logits[i : i + 1], u[i : i + 1], 0.8, top_k, top_p)[0] == whole[i] for i in range(6))


@both
@pytest.mark.parametrize("wrong", [(-1.0, 0, 1.0), (math.nan, 0, 1.0), (1.0, -1, 1.0), (1.0, 0, 0.0), (1.0, 0, 1.5)])
def test_options_out_of_range_are_errors(draw, wrong):
    with pytest.raises(ValueError, match="need temperature"):
        draw(torch.zeros(1, 3), torch.zeros(1), *wrong)


def reach(logits, ids, temperature, top_k, top_p, banned):
    """Return per row where the CDF intervals of the tokens ``ids`` begin and end, in float64."""
    x = (logits / (temperature or 1.0)).double().masked_fill(banned, float("-inf"))
    order = x.sort(dim=-1, descending=True, stable=True).indices
    few = 0 < top_k < x.shape[1]
    if not few and top_p == 1.0:
        order = torch.arange(x.shape[1]).expand_as(x)
    probs = x.gather(-1, order).softmax(-1)
    if few:
        probs[:, top_k:] = 0
    probs = probs / probs.sum(-1, keepdim=True)
    if top_p < 1.0:
        probs = probs.masked_fill(probs.cumsum(-1) - probs >= top_p, 0.0)
    probs = probs / probs.sum(-1, keepdim=True)
    end = probs.cumsum(-1)
    at = (order == ids[:, None]).long().argmax(-1, keepdim=True)
    return (end - probs).gather(-1, at)[:, 0], end.gather(-1, at)[:, 0]


@settings(max_examples=examples(50))
@given(
    st.sampled_from([1, 2, 50, 128, 129, 1000, 5003]),
    st.sampled_from([0.3, 1.0, 1.7]),
    st.sampled_from([0, 1, 3, 40, 700]),
    st.sampled_from([1.0, 0.9991, 0.8123, 0.05171]),  # not a multiple of the probability of tied tokens
    st.sampled_from([0.0, 0.02, 3.0, 30.0]),  # equal, nearly equal, as in a model, one dominant token
    st.booleans(),
    st.integers(0, 2**31),
)
def test_the_kernel_samples_the_same_tokens_as_the_reference(vocab, temperature, top_k, top_p, spread, ties, seed):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(5, vocab, generator=generator) * spread
    logits = logits.mul(2).round().div(2) if ties else logits
    u = torch.rand(5, generator=generator, dtype=torch.float64)
    forbid = torch.randint(1, vocab, (3,), generator=generator) if vocab > 1 else None
    rows = torch.rand(5, generator=generator) < 0.5
    result = sample(logits, u, temperature, top_k, top_p, forbid, rows)
    expected = sample_reference(logits, u, temperature, top_k, top_p, forbid, rows)
    banned = torch.zeros(5, vocab, dtype=torch.bool)
    if forbid is not None:
        banned[rows] = banned[rows].index_fill(1, forbid, True)
    begin, end = reach(logits, result[0], temperature, top_k, top_p, banned)
    near = 1e-4 if top_p < 1.0 else 2e-6  # one token more or less within top p shifts all others
    same = result[0] == expected[0]
    assert bool(((begin - near <= u) & (u <= end + near)).all())
    clear = (begin + near < u) & (u < end - near)
    assert bool((same | ~clear).all())
    assert torch.allclose(result[1][same], expected[1][same], atol=1e-5)
    assert torch.allclose(result[2][same], expected[2][same], atol=1e-5 if top_p == 1.0 else 1e-3)


@pytest.mark.parametrize("options", [(0.7,), (1.0, 40), (0.7, 0, 0.9), (0.7, 300, 0.9), (0.0,)])
def test_results_do_not_depend_on_the_number_of_threads(options):
    generator = torch.Generator().manual_seed(0)
    logits, u = torch.randn(9, 20_011, generator=generator), torch.rand(9, generator=generator)
    threads, results = torch.get_num_threads(), []
    try:
        for n in (1, 3):
            torch.set_num_threads(n)
            results.append(sample(logits, u, *options))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@both
def test_logits_far_apart_and_a_forbidden_most_likely_token(draw):
    logits = torch.full((1, 300), -1e4)
    logits[0, 7], logits[0, 200] = 900.0, 0.0
    for options in ((1.0,), (1.0, 3), (1.0, 0, 0.5)):
        tokens, logprobs, sampling = draw(logits, torch.tensor([0.5]), *options, forbid=torch.tensor([7, 7]))
        assert (tokens.item(), logprobs.item(), sampling.item()) == (200, -900.0, 0.0)


OPTIONS = ((1.0,), (0.7,), (1.0, 5), (1.0, 5, 0.5), (1.0, 0, 0.5), (0.3, 0, 0.05), (0.0,))
ODD_VALUES = (math.nan, -math.nan, math.inf, -math.inf, 1e30, -1e30, 1e-45)


def has_distribution(row, temperature, forbidden):
    """Return True if every tempered logit is finite or -inf, and one that is not forbidden is finite."""
    scaled = row / (temperature or 1.0)
    allowed = [x for i, x in enumerate(scaled.tolist()) if i not in forbidden]
    return not bool((scaled.isnan() | (scaled == math.inf)).any()) and any(math.isfinite(x) for x in allowed)


def draw_with_odd_values(draw, device, vocab, options, poison, n_forbidden, seed):
    """Draw from rows in which values of ``poison`` replace some logits; return all that a check needs."""
    generator = torch.Generator().manual_seed(seed)
    logits, u = torch.randn(6, vocab, generator=generator) * 3, torch.rand(6, generator=generator, dtype=torch.float64)
    for row, (value, n_values) in enumerate(poison):
        logits[row, torch.randint(0, vocab, (n_values,), generator=generator)] = value
    logits[5] = poison[0][0]  # a whole row
    forbid = torch.randint(0, vocab, (n_forbidden,), generator=generator)
    rows = torch.rand(6, generator=generator) < 0.5
    given = [x.to(device) for x in (logits, u, forbid, rows)]
    drawn = [x.cpu() for x in draw(given[0], given[1], *options, forbid=given[2], forbid_rows=given[3])]
    return logits, forbid, rows, drawn


devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(
    not torch.cuda.is_available(), reason="no CUDA device")])])  # fmt: skip


@both
@devices
@settings(max_examples=examples(100), deadline=None)
@given(
    st.sampled_from([1, 2, 63, 64, 65, 129, 1000]),
    st.sampled_from(OPTIONS),
    st.lists(st.tuples(st.sampled_from(ODD_VALUES), st.sampled_from([1, 3, 200])), min_size=1, max_size=5),
    st.integers(0, 3),
    st.integers(0, 2**31),
)
def test_rows_that_are_not_finite_have_no_token(draw, device, vocab, options, poison, n_forbidden, seed):
    logits, forbid, rows, drawn = draw_with_odd_values(draw, device, vocab, options, poison, n_forbidden, seed)
    for i, (token, *logprobs) in enumerate(zip(*(x.tolist() for x in drawn), strict=True)):
        forbidden = set(forbid.tolist()) if rows[i] else set()
        if has_distribution(logits[i], options[0], forbidden):
            assert 0 <= token < vocab and token not in forbidden and math.isfinite(logits[i, token])
            assert all(map(math.isfinite, logprobs))
        else:
            assert token == NO_TOKEN and all(map(math.isnan, logprobs))


@pytest.mark.parametrize("value", [math.nan, -math.nan, math.inf])
@pytest.mark.parametrize("options", OPTIONS)
@both
def test_a_row_does_not_depend_on_rows_that_are_not_finite(draw, options, value):
    generator = torch.Generator().manual_seed(0)
    logits, u = torch.randn(3, 130, generator=generator), torch.rand(3, generator=generator)
    expected = [x[[0, 2]] for x in draw(logits, u, *options)]
    logits[1, 77] = value
    drawn = draw(logits, u, *options)
    assert drawn[0][1] == NO_TOKEN and all(torch.equal(a[[0, 2]], b) for a, b in zip(drawn, expected, strict=True))


@both
@pytest.mark.parametrize("forbid", list(itertools.permutations([0, 1, 2])))
def test_forbidden_logits_that_are_not_finite_are_noticed(draw, forbid):
    """In any place of the list of forbidden tokens."""
    for value, options in itertools.product((math.nan, math.inf), OPTIONS):
        logits = torch.tensor([[value, 1.0, 2.0, 3.0, 4.0]])
        tokens, *logprobs = draw(logits, torch.zeros(1), *options, forbid=torch.tensor(forbid))
        assert tokens.tolist() == [NO_TOKEN] and all(x.isnan().all() for x in logprobs)


@both
def test_a_row_without_an_allowed_token_has_no_token(draw):
    for options in OPTIONS:
        tokens, *logprobs = draw(torch.zeros(1, 3), torch.zeros(1), *options, forbid=torch.tensor([2, 0, 1]))
        assert tokens.tolist() == [NO_TOKEN] and all(x.isnan().all() for x in logprobs)


def test_kernels_pass_opcheck_and_reject_invalid_arguments():
    kernel, hashing = extension.kernel("sample_tokens", "cpu"), extension.kernel("counter_uniform", "cpu")
    if kernel is None or hashing is None:
        pytest.skip("NATIVE KERNELS NOT BUILT")
    logits, u, forbid = torch.randn(3, 40), torch.rand(3, dtype=torch.float64), torch.tensor([1])
    torch.library.opcheck(kernel, (logits, u, forbid, torch.tensor([True, False, True]), 0.7, 5, 0.9))
    torch.library.opcheck(hashing, (5, *torch.arange(12).reshape(3, 4)))
    with pytest.raises(RuntimeError, match=r"u must be \[3\] float64"):
        kernel(logits, u.float(), None, None, 1.0, 0, 1.0)
    with pytest.raises(RuntimeError, match="token 40 is forbidden, but the vocabulary has 40"):
        kernel(logits, u, torch.tensor([40]), None, 1.0, 0, 1.0)
    with pytest.raises(RuntimeError, match="need temperature >= 0"):
        kernel(logits, u, None, None, -1.0, 0, 1.0)
    with pytest.raises(RuntimeError, match=r"counters must be \[S\] int64"):
        hashing(5, torch.zeros(3), torch.zeros(3), torch.zeros(3))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("options", [(0.7,), (1.0, 40), (0.7, 0, 0.9), (0.7, 300, 0.9), (0.0,), (1.0, 0, 0.05)])
def test_cuda_matches_the_cpu_reference(options):
    generator = torch.Generator().manual_seed(0)
    logits, u = torch.randn(64, 20_011, generator=generator) * 3, torch.rand(64, generator=generator)
    forbid, rows = torch.tensor([5, 9, 5]), torch.arange(64) % 2 == 0
    expected = sample_reference(logits, u, *options, forbid=forbid, forbid_rows=rows)
    result = [x.cpu() for x in sample(logits.cuda(), u.cuda(), *options, forbid=forbid.cuda(), forbid_rows=rows.cuda())]
    same = result[0] == expected[0]
    assert int(same.sum()) >= 63  # u may be within rounding error of a boundary
    assert torch.allclose(result[1][same], expected[1][same], atol=1e-5)
    assert torch.allclose(result[2][same], expected[2][same], atol=1e-4)
    counters = torch.arange(300).reshape(3, 100)
    assert torch.equal(uniform(9, *counters.cuda()).cpu(), uniform_reference(9, *counters))
