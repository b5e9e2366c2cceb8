"""Chunked log-probabilities against log_softmax over all logits."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from realhf.ops.logprobs import packed_logprobs


def problem(count: int, vocab: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(count * 31 + vocab)
    hidden = torch.randn(count, 6).to(dtype).requires_grad_()
    weight = torch.randn(vocab, 6).to(dtype).requires_grad_()
    return hidden, weight, torch.randint(vocab, (count,))


def all_at_once(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, t: float) -> torch.Tensor:
    return torch.log_softmax((hidden @ weight.t()).float() / t, -1).gather(1, targets[:, None])[:, 0]


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 20), st.integers(1, 30), st.integers(1, 8), st.sampled_from([0.5, 1.0, 1.7]))
def test_values_and_gradients_are_exact(count: int, vocab: int, chunk: int, temperature: float) -> None:
    hidden, weight, targets = problem(count, vocab)
    slopes = torch.randn(count) * (torch.rand(count) < 0.6)
    ours = packed_logprobs(hidden, weight, targets, temperature, chunk)
    theirs = all_at_once(hidden, weight, targets, temperature)
    assert ours.dtype == torch.float32
    assert torch.allclose(ours, theirs, atol=1e-5)
    for a, b in zip(
        torch.autograd.grad((ours * slopes).sum(), (hidden, weight)),
        torch.autograd.grad((theirs * slopes).sum(), (hidden, weight)),
        strict=True,
    ):
        assert torch.allclose(a, b, atol=1e-5)


def test_large_logits_stay_finite() -> None:
    hidden, weight, targets = problem(4, 7)
    assert torch.allclose(
        packed_logprobs(hidden * 1e3, weight, targets), all_at_once(hidden * 1e3, weight, targets, 1.0), rtol=1e-5
    )


def test_a_gradient_that_nobody_needs_is_not_made() -> None:
    hidden, weight, targets = problem(5, 7)
    packed_logprobs(hidden, weight.detach(), targets).sum().backward()
    assert hidden.grad is not None
    assert weight.grad is None
    packed_logprobs(hidden.detach(), weight, targets).sum().backward()
    assert weight.grad is not None


def test_sixteen_bit_inputs_give_sixteen_bit_gradients() -> None:
    hidden, weight, targets = problem(12, 9, torch.bfloat16)
    ours = packed_logprobs(hidden, weight, targets, chunk=5)
    theirs = all_at_once(hidden, weight, targets, 1.0)
    assert torch.allclose(ours, theirs, atol=1e-5)
    grads = torch.autograd.grad(ours.sum(), (hidden, weight))
    for a, b in zip(grads, torch.autograd.grad(theirs.sum(), (hidden, weight)), strict=True):
        assert a.dtype == torch.bfloat16
        assert torch.allclose(a, b, atol=0.1)


def test_a_temperature_of_zero_is_refused() -> None:
    hidden, weight, targets = problem(2, 3)
    with pytest.raises(ValueError, match="temperature must be positive, got 0"):
        packed_logprobs(hidden, weight, targets, temperature=0)
