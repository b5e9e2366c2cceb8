"""Expert layers and their gradients against a loop over tokens; router losses against their definitions."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from realhf.ops.moe import (
    ExpertOrder,
    RoutingRule,
    add_loss,
    balance_loss,
    combine,
    dispatch,
    grouped_linear,
    load_ratios,
    route,
    sort_by_expert,
    z_loss,
)
from tests.scaling import examples

DOUBLE = torch.float64


def problem(tokens: int, experts: int, per_token: int) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(tokens * 7 + experts)
    x = torch.randn(tokens, 5, dtype=DOUBLE, requires_grad=True)
    weight = torch.randn(experts, 3, 5, dtype=DOUBLE, requires_grad=True)
    shares = torch.rand(tokens, per_token, dtype=DOUBLE, requires_grad=True)
    chosen = torch.rand(tokens, experts).topk(per_token, -1).indices
    return x, weight, shares, chosen


def routed(x: torch.Tensor, weight: torch.Tensor, shares: torch.Tensor, by: ExpertOrder) -> torch.Tensor:
    return combine(grouped_linear(dispatch(x, by), weight, by), shares, by)


sizes = st.integers(1, 5).flatmap(lambda experts: st.tuples(st.just(experts), st.integers(1, experts)))


@settings(max_examples=examples(40))
@given(st.integers(0, 12), sizes)
def test_products_and_gradients_equal_a_loop_over_tokens(tokens: int, sizes: tuple[int, int]) -> None:
    x, weight, shares, chosen = problem(tokens, *sizes)
    ours = routed(x, weight, shares, sort_by_expert(chosen, sizes[0]))
    choices = zip(x, shares, chosen, strict=True)
    loop = [sum(p * (weight[e] @ row) for p, e in zip(ps, es, strict=True)) for row, ps, es in choices]
    theirs = torch.stack(loop) if loop else x.new_zeros(0, 3) + 0 * (x.sum() + weight.sum() + shares.sum())
    slopes = torch.randn(tokens, 3, dtype=DOUBLE)
    assert torch.allclose(ours, theirs)
    leaves = (x, weight, shares)
    for a, b in zip(
        torch.autograd.grad((ours * slopes).sum(), leaves),
        torch.autograd.grad((theirs * slopes).sum(), leaves),
        strict=True,
    ):
        assert torch.allclose(a, b)


def test_tokens_are_sorted_by_expert_in_their_order() -> None:
    by = sort_by_expert(torch.tensor([[2, 0], [0, 1], [2, 1]]), 4)
    assert by.order.tolist() == [1, 2, 3, 5, 0, 4]
    assert by.sizes == (2, 2, 2, 0)
    assert by.order[by.inverse].tolist() == list(range(6))


GPU = (pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=GPU)])
@settings(max_examples=examples(20))
@given(st.integers(1, 40), sizes, st.integers(0, 1000))
def test_grouped_products_and_their_gradients_equal_one_per_expert(
    device: str, tokens: int, sizes: tuple[int, int], seed: int
) -> None:
    """Experts without tokens have a gradient of zero."""
    torch.manual_seed(seed)
    x = torch.randn(tokens, 16, dtype=torch.bfloat16, device=device, requires_grad=True)
    weight = torch.randn(sizes[0], 24, 16, dtype=torch.bfloat16, device=device, requires_grad=True)
    shares = torch.rand(tokens, sizes[1], dtype=torch.bfloat16, device=device)
    chosen = torch.rand(tokens, sizes[0], device=device).topk(sizes[1], -1).indices
    slopes = torch.randn(tokens, 24, dtype=torch.bfloat16, device=device)
    results = []
    for grouped in (False, True):
        out = routed(x, weight, shares, sort_by_expert(chosen, sizes[0], grouped))
        results.append([out, *torch.autograd.grad((out * slopes).sum(), (x, weight))])
    for apart, together in zip(*results, strict=True):
        torch.testing.assert_close(together, apart, atol=0.05, rtol=0.02)


@settings(max_examples=examples(40))
@given(st.integers(0, 20), st.integers(2, 6), st.data())
def test_parts_of_the_experts_add_up(tokens: int, experts: int, data: st.DataObject) -> None:
    """Pairs of other experts are left out, also of grouped products, which do not write their rows."""
    per_token, cut = data.draw(st.integers(1, experts)), data.draw(st.integers(1, experts - 1))
    torch.manual_seed(tokens)
    chosen = torch.rand(tokens, experts).topk(per_token, -1).indices
    shares = torch.rand(tokens, per_token)
    results = []
    for grouped, dtype in ((False, torch.float32), (True, torch.bfloat16)):
        x = torch.linspace(-1, 1, tokens * 16).view(-1, 16).to(dtype).requires_grad_()
        weight = torch.linspace(-1, 1, experts * 24 * 16).view(experts, 24, 16).to(dtype).requires_grad_()
        total = x.new_zeros(tokens, 24)
        for own in (range(cut), range(cut, experts)):
            numbers = torch.full((experts,), len(own))
            numbers[own.start : own.stop] = torch.arange(len(own))
            by = sort_by_expert(chosen, len(own), grouped, numbers)
            assert by.experts.tolist()[: sum(by.sizes)] == sorted(by.experts.tolist())[: sum(by.sizes)]
            total = total + routed(x, weight[own.start : own.stop], shares.to(dtype), by)
        whole = routed(x, weight, shares.to(dtype), sort_by_expert(chosen, experts))
        atol = 1e-5 if dtype == torch.float32 else 0.1
        torch.testing.assert_close(total, whole, atol=atol, rtol=0.02)
        for part, every in zip(*(torch.autograd.grad(y.sum(), (x, weight)) for y in (total, whole)), strict=True):
            torch.testing.assert_close(part, every, atol=10 * atol, rtol=0.02)
        results.append(total)
    torch.testing.assert_close(results[1].float(), results[0], atol=0.1, rtol=0.05)


def test_loads_of_experts_and_ranks() -> None:
    loads = torch.tensor([[3.0, 1, 1, 1], [1, 1, 1, 1]])
    assert load_ratios(loads, 1).tolist() == [pytest.approx((2 + 1) / 2), 1]
    assert load_ratios(loads, 2).tolist() == [pytest.approx((2 + 1) / 2), pytest.approx((4 / 3 + 1) / 2)]
    assert load_ratios(torch.zeros(1, 4), 2).tolist() == [0, 0]


def test_only_required_gradients_are_computed() -> None:
    x, weight, shares, chosen = problem(4, 3, 2)
    routed(x.detach(), weight, shares, sort_by_expert(chosen, 3)).sum().backward()
    assert x.grad is None and weight.grad is not None


@pytest.mark.parametrize("renormalise", [True, False])
def test_the_most_probable_experts_are_taken(renormalise: bool) -> None:
    logits = torch.log(torch.tensor([[0.1, 0.5, 0.1, 0.3], [0.4, 0.3, 0.2, 0.1]]))
    probs, weights, experts = route(logits, RoutingRule(2, renormalise))
    assert torch.allclose(probs, logits.exp())
    assert experts.tolist() == [[1, 3], [0, 1]]
    expected = torch.tensor([[0.5, 0.3], [0.4, 0.3]])
    assert torch.allclose(weights, expected / expected.sum(-1, keepdim=True) if renormalise else expected)
    assert route(logits.bfloat16(), RoutingRule(2, renormalise))[1].dtype == torch.bfloat16


def definition(probs: torch.Tensor, experts: torch.Tensor) -> float:
    """``n * E * sum_e f_e P_e`` of one row."""
    n, n_experts = probs.shape
    return sum(float(n_experts * (experts == e).sum() * probs[:, e].mean()) for e in range(n_experts))


def test_the_balance_loss_is_a_sum_over_rows_and_over_shares_of_tokens() -> None:
    torch.manual_seed(0)
    lengths, n_experts = [5, 1, 0, 4], 6
    probs = torch.randn(10, n_experts).softmax(-1)
    experts = probs.topk(2, -1).indices
    rows = torch.arange(4).repeat_interleave(torch.tensor(lengths))
    total = balance_loss(probs, experts, rows, 4, rows)
    parts = zip(probs.split(lengths), experts.split(lengths), strict=True)
    assert float(total) == pytest.approx(sum(definition(p, e) for p, e in parts if len(p)), rel=1e-5)
    shares = [
        balance_loss(probs[mine], experts, rows, 4, rows[mine]) for mine in (slice(0, 4), slice(4, 10), slice(10, 10))
    ]
    assert float(sum(shares)) == pytest.approx(float(total), rel=1e-5)


def test_a_balanced_router_costs_as_many_as_a_token_has_experts() -> None:
    probs, experts = torch.full((4, 4), 0.25), torch.tensor([[0, 1], [1, 2], [2, 3], [3, 0]])
    rows = torch.zeros(4, dtype=torch.int64)
    assert float(balance_loss(probs, experts, rows, 1, rows)) / 4 == 2.0


def test_the_z_loss_is_the_squared_log_partition_function() -> None:
    logits = torch.tensor([[0.0, 0.0], [1.0, 2.0]])
    assert torch.allclose(z_loss(logits), logits.exp().sum(-1).log().square().sum())
    assert z_loss(logits.bfloat16()).dtype == torch.float32


def test_an_added_loss_is_differentiated_with_what_carries_it() -> None:
    x, w = torch.ones(3, requires_grad=True), torch.tensor(2.0, requires_grad=True)
    carrier = add_loss(x * 1.0, w**2)
    assert torch.equal(carrier, x)
    (carrier * 5).sum().backward()
    assert x.grad.tolist() == [5.0] * 3 and float(w.grad) == 4.0
