"""Entropies, candidates' log-probabilities and the most probable tokens against log_softmax over all logits."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from realhf.ops import distributions
from realhf.ops.distributions import packed_distribution, packed_top_logprobs
from tests.ops.test_logprobs import TwoWorkers
from tests.scaling import examples


def problem(count: int, vocab: int, k: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(seed + count * 31 + vocab)
    hidden, weight = (torch.randn(n, 6).requires_grad_() for n in (count, vocab))
    return hidden, weight, torch.randint(vocab, (count, k))


def all_at_once(hidden: torch.Tensor, weight: torch.Tensor, t: float, softcap: float) -> torch.Tensor:
    logits = hidden @ weight.t()
    return torch.log_softmax((torch.tanh(logits / softcap) * softcap if softcap else logits) / t, -1)


@settings(max_examples=examples(40))
@given(
    st.integers(0, 20),
    st.integers(1, 30),
    st.integers(0, 4),
    st.sampled_from([1, 7, 100]),
    st.sampled_from([0.5, 1.0, 1.7]),
    st.sampled_from([0.0, 3.0]),
)
def test_values_and_gradients(count: int, vocab: int, k: int, chunk: int, temperature: float, softcap: float) -> None:
    hidden, weight, ids = problem(count, vocab, k)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(distributions, "CHUNK", {"cpu": chunk})
        ours = packed_distribution(hidden, weight, ids, temperature, softcap)
        logps = all_at_once(hidden.double(), weight.double(), temperature, softcap)
        theirs = torch.cat((logps.gather(1, ids), -(logps.exp() * logps).sum(1, keepdim=True)), 1)
        assert torch.allclose(ours.double(), theirs, atol=1e-5)
        slopes = torch.randn(ours.shape) * (torch.rand(count, 1) < 0.6)
        gradients = [torch.autograd.grad((x * slopes).sum(), (hidden, weight)) for x in (ours, theirs)]
    for a, b in zip(*gradients, strict=True):
        assert torch.allclose(a, b, atol=3e-5, rtol=1e-4)


def test_the_gradient_of_the_weight_is_added_to_a_buffer() -> None:
    hidden, weight, ids = problem(9, 11, 3)
    (expected,) = torch.autograd.grad(packed_distribution(hidden, weight, ids).sum(), weight)
    total = torch.ones_like(weight)
    packed_distribution(hidden, weight, ids, add_to=total).sum().backward()
    assert torch.allclose(total, 1 + expected, atol=1e-6) and weight.grad is None and hidden.grad is not None


@pytest.mark.parametrize("widths", [(7, 4), (1, 10)])
def test_vocabulary_shards_match_the_whole_vocabulary(widths: tuple[int, int]) -> None:
    hidden, weight, ids = problem(13, 11, 3)
    whole = packed_distribution(hidden, weight, ids, 0.7, 5.0)
    top_ids, top = packed_top_logprobs(hidden, weight, 4, 0.7, 5.0, vocab=9)
    slopes = torch.randn(whole.shape)
    expected = torch.autograd.grad((whole * slopes).sum(), (hidden, weight))
    workers = TwoWorkers(widths)

    def work(rank: int) -> tuple[torch.Tensor, ...]:
        part = weight.detach().split(widths)[rank].clone().requires_grad_()
        x = hidden.detach().clone().requires_grad_()
        values = packed_distribution(x, part, ids, 0.7, 5.0, workers.shard(rank))
        gradients = torch.autograd.grad((values * slopes).sum(), (x, part))
        return values, *gradients, *packed_top_logprobs(x, part, 4, 0.7, 5.0, workers.shard(rank), vocab=9)

    results = workers.run(work)
    for values, _, _, their_ids, their_top in results:
        assert torch.allclose(values, whole, atol=1e-5)
        assert torch.equal(their_ids, top_ids) and torch.allclose(their_top, top, atol=1e-5)
    assert torch.allclose(results[0][1] + results[1][1], expected[0], atol=1e-5)
    assert torch.allclose(torch.cat([r[2] for r in results]), expected[1], atol=1e-5)


@settings(max_examples=examples(40))
@given(st.integers(0, 12), st.integers(1, 30), st.data())
def test_the_most_probable_tokens(count: int, vocab: int, data: st.DataObject) -> None:
    below = data.draw(st.integers(1, vocab))
    k = data.draw(st.integers(1, below))
    hidden, weight, _ = problem(count, vocab, 0)
    ids, top = packed_top_logprobs(hidden, weight, k, 0.8, 2.0, vocab=below)
    logps = all_at_once(hidden, weight, 0.8, 2.0)
    assert torch.allclose(top, logps[:, :below].topk(k).values, atol=1e-5)
    assert torch.allclose(logps.gather(1, ids), top, atol=1e-5) and bool((ids < below).all())


def test_too_many_tokens_are_refused() -> None:
    hidden, weight, _ = problem(3, 5, 0)
    with pytest.raises(ValueError, match="the 5 most probable of 4 tokens"):
        packed_top_logprobs(hidden, weight, 5, vocab=4)
