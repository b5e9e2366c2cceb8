"""Routed experts: which ones a token goes to, products over tokens sorted by expert, and the losses of the router."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class ExpertOrder:
    """Tokens sorted by expert. ``order`` ``[T*k]`` lists the choices of all tokens by expert, ``inverse`` undoes it.

    Choice ``k*t + j`` is the j-th of token t. ``sizes`` are how many choices each expert has.
    """

    order: Tensor
    inverse: Tensor
    sizes: tuple[int, ...]
    per_token: int


def route(logits: Tensor, per_token: int, renormalise: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return probabilities ``[T, E]`` (float32), weights and experts (``[T, k]``) of a router's ``[T, E]`` logits.

    A token's experts are the ``per_token`` most probable ones, and their weights the probabilities, divided by their
    sum where ``renormalise`` says so (Mixtral, arXiv 2401.04088, section 2.1).
    """
    probs = logits.softmax(-1, dtype=torch.float32)
    weights, experts = probs.topk(per_token, -1)
    if renormalise:
        weights = weights / weights.sum(-1, keepdim=True)
    return probs, weights.to(logits.dtype), experts


def sort_by_expert(experts: Tensor, n_experts: int) -> ExpertOrder:
    """Sort the choices ``[T, k]`` by expert, tokens of one expert in their order. Waits for the device."""
    flat = experts.flatten()
    order = flat.argsort(stable=True)
    inverse = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    return ExpertOrder(order, inverse, tuple(flat.bincount(minlength=n_experts).tolist()), experts.shape[1])


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, by: ExpertOrder) -> Tensor:
        ctx.by = by
        return x.index_select(0, by.order // by.per_token)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.index_select(0, ctx.by.inverse).unflatten(0, (-1, ctx.by.per_token)).sum(1), None


class _Collect(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, by: ExpertOrder) -> Tensor:
        ctx.by = by
        return y.index_select(0, by.inverse)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.index_select(0, ctx.by.order), None


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, sizes: tuple[int, ...]) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.sizes = sizes
        out = x.new_empty(len(x), weight.shape[1])
        for rows, matrix, product in zip(x.split(sizes), weight, out.split(sizes), strict=True):
            torch.mm(rows, matrix.t(), out=product)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        need_x, need_weight = ctx.needs_input_grad[:2]
        grad_x = torch.empty_like(x) if need_x else None
        grad_weight = torch.empty_like(weight) if need_weight else None
        start = 0
        for expert, size in enumerate(ctx.sizes):
            rows, start = slice(start, start + size), start + size
            if grad_x is not None:
                torch.mm(grad[rows], weight[expert], out=grad_x[rows])
            if grad_weight is not None:
                torch.mm(grad[rows].t(), x[rows], out=grad_weight[expert])
        return grad_x, grad_weight, None


def dispatch(x: Tensor, by: ExpertOrder) -> Tensor:
    """Copy each token ``[T, D]`` to each of its experts, sorted by expert: ``[T*k, D]``."""
    return _Dispatch.apply(x, by)


def grouped_linear(x: Tensor, weight: Tensor, by: ExpertOrder) -> Tensor:
    """Multiply the tokens of each expert by its matrix: ``x`` is ``[T*k, D]``, ``weight`` ``[E, out, D]``."""
    return _GroupedLinear.apply(x, weight, by.sizes)


def combine(y: Tensor, weights: Tensor, by: ExpertOrder) -> Tensor:
    """Add up what a token's experts returned (``y`` ``[T*k, D]``) with its weights ``[T, k]``: ``[T, D]``."""
    by_token = _Collect.apply(y, by).unflatten(0, (-1, by.per_token))
    return torch.bmm(weights.unsqueeze(1), by_token).squeeze(1)


def balance_loss(probs: Tensor, experts: Tensor, rows: Tensor, n_rows: int, mine: slice) -> Tensor:
    """Return the load-balancing loss of my tokens: a sum over tokens.

    ``probs`` (``[t, E]``) are of my tokens, ``experts`` (``[T, k]``) and ``rows`` (``[T]``, the row each token is in)
    of all. For a row of n tokens it is ``n * E * sum_e f_e P_e``, where ``f_e`` is the share of its tokens that chose
    expert e and ``P_e`` the mean of their probabilities for it: the loss of Switch Transformer (arXiv 2101.03961,
    eq. 4) over one sequence at a time (DeepSeek-V3, arXiv 2412.19437, eq. 17). No statistic spans rows, so it depends
    on neither micro-batches nor layout; divided by the tokens it is k for a balanced router.
    """
    n_experts = probs.shape[1]
    places = (rows[:, None] * n_experts + experts).flatten()
    chosen = torch.zeros(n_rows * n_experts, device=probs.device)
    chosen = chosen.scatter_add_(0, places, torch.ones(len(places), device=probs.device)).view(n_rows, n_experts)
    lengths = rows.bincount(minlength=n_rows)
    shares = (chosen / lengths.clamp(min=1)[:, None]).index_select(0, rows[mine])
    return n_experts * (shares * probs).sum()


def z_loss(logits: Tensor) -> Tensor:
    """Return the sum over tokens of the squared log-partition function of ``[t, E]`` logits.

    Source: ST-MoE, arXiv 2202.08906, eq. 5.
    """
    return logits.float().logsumexp(-1).square().sum()


class _AddLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        ctx.loss = loss.new_ones(())
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad, ctx.loss


def add_loss(x: Tensor, loss: Tensor) -> Tensor:
    """Return ``x``; whatever is differentiated through it, ``loss`` is added to."""
    return _AddLoss.apply(x, loss)
