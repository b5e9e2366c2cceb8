"""Mixture of experts: routing, grouped matrix products over tokens sorted by expert, and router losses."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from realhf.api.machine import GROUPED_CAPABILITIES

TINY = 1e-20
"""Added to sums of sigmoids, which may be zero."""


@dataclass(frozen=True)
class ExpertOrder:
    """The permutation that sorts (token, expert) pairs by expert, ``order`` ``[T*k]``, and its ``inverse``.

    Pair ``k*t + j`` is the j-th expert of token t, of all pairs ``numbers``. ``sizes`` are the numbers
    of pairs per expert in host memory. For grouped products ``ends`` has the end of every expert's pairs on the device,
    ``[E]`` int32, and there are no sizes. Where pairs of other experts are left out, ``is_partial``, these have a place
    after all others in ``inverse``; in grouped products they are the ``tail`` of the sorted pairs, ``[T*k, 1]`` bool.
    """

    order: Tensor
    inverse: Tensor
    numbers: Tensor
    top_k: int
    sizes: tuple[int, ...] = ()
    ends: Tensor | None = None
    is_partial: bool = False
    tail: Tensor | None = None

    @property
    def experts(self) -> Tensor:
        """The experts of the sorted pairs; of those in the ``tail`` any."""
        chosen = self.numbers.index_select(0, self.order)
        if self.ends is not None and self.is_partial:
            chosen = chosen.clamp(max=len(self.ends) - 1)
        return chosen

    def by_pair(self, sorted_rows: Tensor) -> Tensor:
        """Return the rows of all pairs, ``[T*k, ...]``; zero for those that are left out."""
        if self.is_partial:
            sorted_rows = torch.cat((sorted_rows, sorted_rows.new_zeros(1, *sorted_rows.shape[1:])))
        return sorted_rows.index_select(0, self.inverse)


@dataclass(frozen=True)
class RoutingRule:
    """How a token's ``top_k`` experts and their weights follow from the logits of a router.

    Scores are the softmax or, with ``sigmoid``, the sigmoid of logits. ``groups``: experts are in so many groups of
    adjacent ones, of which a token uses some, those with the largest sums of their two best scores (DeepSeek-V3, arXiv
    2412.19437, section 2.1.2). ``renormalise``: weights sum to 1 (Mixtral, arXiv 2401.04088, section 2.1), times
    ``scale``.
    """

    top_k: int
    renormalise: bool
    sigmoid: bool = False
    groups: tuple[int, int] = (1, 1)
    scale: float = 1.0

    def choose(self, scores: Tensor, bias: Tensor | None) -> Tensor:
        """Return the experts of every token, ``[T, k]``; ``bias`` ``[E]`` is added to scores (2412.19437, eq. 16)."""
        scores = scores.detach() if bias is None else scores.detach() + bias.detach()
        n_groups, n_used = self.groups
        if n_used < n_groups:
            grouped = scores.unflatten(-1, (n_groups, -1))
            best = grouped.topk(2, -1).values.sum(-1).topk(n_used, -1, sorted=False).indices
            is_used = torch.zeros(*scores.shape[:-1], n_groups, dtype=torch.bool, device=scores.device)
            is_used.scatter_(-1, best, True)
            scores = grouped.masked_fill(~is_used[..., None], float("-inf")).flatten(-2)
        return scores.topk(self.top_k, -1).indices


def route(
    logits: Tensor, rule: RoutingRule, bias: Tensor | None = None, replayed: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return probabilities ``[T, E]`` (float32), weights and experts (``[T, k]``) of a router's ``[T, E]`` logits.

    Probabilities of sigmoid scores are their shares of the token's sum. With ``replayed`` ``[T, k]`` a token goes to
    these experts instead of those that the rule chooses, with weights of its own scores (arXiv 2510.11370); a token
    whose experts are not known has the number E.
    """
    scores = logits.float().sigmoid() if rule.sigmoid else logits.softmax(-1, dtype=torch.float32)
    if bias is None and rule.groups == (1, 1):
        weights, experts = scores.topk(rule.top_k, -1)
    else:
        experts = rule.choose(scores, bias)
        weights = scores.gather(-1, experts)
    if replayed is not None:
        experts = torch.where(replayed < scores.shape[1], replayed.to(torch.int64), experts)
        weights = scores.gather(-1, experts)
    if rule.renormalise:
        total = weights.sum(-1, keepdim=True)
        weights = weights / (total + TINY if rule.sigmoid else total)
    if rule.scale != 1:
        weights = weights * rule.scale
    probs = scores / (scores.sum(-1, keepdim=True) + TINY) if rule.sigmoid else scores
    return probs, weights.to(logits.dtype), experts


def expert_dtype(n_experts: int) -> torch.dtype:
    """Return a small integer type for the numbers of experts, and for ``n_experts``: not known."""
    return torch.uint8 if n_experts < 256 else torch.int32  # NCCL has no 16-bit integers


def has_grouped_kernel(*weights: Tensor) -> bool:
    """Return True if torch multiplies by these weights, ``[E, out, in]``, without copying sizes to the host.

    It does from torch 2.10 on, in bfloat16 on Hopper and Blackwell (sm_90, sm_100), for rows of whole 16 bytes.
    """
    if not weights[0].is_cuda or not hasattr(F, "grouped_mm"):
        return False
    fits = [w.dtype == torch.bfloat16 and not (w.shape[1] % 8 or w.shape[2] % 8 or w.data_ptr() % 16) for w in weights]
    return all(fits) and torch.cuda.get_device_capability(weights[0].device)[0] in GROUPED_CAPABILITIES


def sort_by_expert(
    experts: Tensor, n_experts: int, grouped: bool = False, numbers: Tensor | None = None
) -> ExpertOrder:
    """Sort the pairs of ``experts`` ``[T, k]`` stably by expert, for grouped products or for one product per expert.

    The latter waits for the device once, for the sizes. ``numbers`` ``[E]`` int64 renumbers the experts; pairs with
    the number ``n_experts`` are left out.
    """
    flat = experts.flatten() if numbers is None else numbers.index_select(0, experts.flatten())
    order = flat.argsort(stable=True)
    inverse = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    counts, ends, tail, sizes = _counts(flat, n_experts + 1)[:n_experts], None, None, ()
    if grouped:
        ends = counts.cumsum(0, dtype=torch.int32)
        if numbers is not None:
            tail = (torch.arange(len(order), device=order.device) >= ends[-1])[:, None]
            inverse = torch.where(inverse < ends[-1], inverse, len(order))
    else:
        sizes = tuple(counts.tolist())
        if numbers is not None:
            order, inverse = order[: sum(sizes)], inverse.clamp(max=sum(sizes))
    return ExpertOrder(order, inverse, flat, experts.shape[1], sizes, ends, numbers is not None, tail)


def _counts(index: Tensor, size: int) -> Tensor:
    """Return how often each of ``size`` numbers occurs, ``[size]`` int64. ``bincount`` waits for a device."""
    return torch.zeros(size, dtype=torch.int64, device=index.device).scatter_add_(0, index, torch.ones_like(index))


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, order: ExpertOrder) -> Tensor:
        ctx.order = order
        return x.index_select(0, order.order // order.top_k)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.order.by_pair(grad).unflatten(0, (-1, ctx.order.top_k)).sum(1), None


class _Collect(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, order: ExpertOrder) -> Tensor:
        ctx.order = order
        return order.by_pair(y)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.index_select(0, ctx.order.order), None


class _SplitLinear(torch.autograd.Function):
    """One product per expert."""

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


class _GroupedLinear(torch.autograd.Function):
    """One launch for all experts. Autograd of torch's operation passes it gradients with strides that it refuses."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, order: ExpertOrder) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.order = order
        return _without_tail(F.grouped_mm(x, weight.transpose(1, 2), offs=order.ends), order)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        (x, weight), ends = ctx.saved_tensors, ctx.order.ends
        need_x, need_weight = ctx.needs_input_grad[:2]
        grad = grad.contiguous()
        grad_x = _without_tail(F.grouped_mm(grad, weight, offs=ends), ctx.order) if need_x else None
        grad_weight = F.grouped_mm(grad.t(), x, offs=ends) if need_weight else None
        return grad_x, grad_weight, None


def _without_tail(rows: Tensor, order: ExpertOrder) -> Tensor:
    """Set the rows to zero that a grouped product has not computed."""
    return rows if order.tail is None else rows.masked_fill_(order.tail, 0.0)


def dispatch(x: Tensor, order: ExpertOrder) -> Tensor:
    """Return each token of ``x`` ``[T, D]`` once per expert, sorted by expert: ``[T*k, D]``."""
    return _Dispatch.apply(x, order)


def collect(y: Tensor, order: ExpertOrder) -> Tensor:
    """Return the rows of sorted pairs ``[T*k, D]`` in the order of the pairs."""
    return _Collect.apply(y, order)


def grouped_linear(x: Tensor, weight: Tensor, order: ExpertOrder) -> Tensor:
    """Multiply each expert's tokens by its matrix: ``[T*k, D]`` and ``[E, out, D]`` to ``[T*k, out]``."""
    if order.ends is not None:
        return _GroupedLinear.apply(x, weight, order)
    return _SplitLinear.apply(x, weight, order.sizes)


def combine(y: Tensor, weights: Tensor, order: ExpertOrder) -> Tensor:
    """Return the weighted sum over each token's experts, ``[T, D]``, of ``y`` ``[T*k, D]`` with weights ``[T, k]``."""
    per_token = collect(y, order).unflatten(0, (-1, order.top_k))
    return torch.bmm(weights.unsqueeze(1), per_token).squeeze(1)


def balance_loss(probs: Tensor, experts: Tensor, rows: Tensor, n_rows: int, local_rows: Tensor) -> Tensor:
    """Return the load-balancing loss, summed over the local tokens.

    ``probs`` ``[t, E]`` and ``local_rows`` ``[t]`` are of these, ``experts`` ``[T, k]`` and ``rows`` ``[T]`` of all.
    A row of n tokens has the loss ``n * E * sum_e f_e P_e``: ``f_e`` is the fraction of its tokens routed to expert e,
    ``P_e`` their mean probability for e. This is the loss of Switch Transformer (arXiv 2101.03961, eq. 4) per sequence
    (DeepSeek-V3, arXiv 2412.19437, eq. 17), so micro-batches and layout do not matter; k per token if it is balanced.
    """
    n_experts = probs.shape[1]
    cells = (rows[:, None] * n_experts + experts).flatten()
    counts = torch.zeros(n_rows * n_experts, device=probs.device)
    counts = counts.scatter_add_(0, cells, torch.ones(len(cells), device=probs.device)).view(n_rows, n_experts)
    lengths = _counts(rows, n_rows)
    fractions = (counts / lengths.clamp(min=1)[:, None]).index_select(0, local_rows)
    return n_experts * (fractions * probs).sum()


LOAD_RATIOS = ("router_max_load", "router_max_rank_load")


def load_ratios(loads: Tensor, ep: int) -> Tensor:
    """Return the largest load over the mean, 1 for balanced ones, as a mean over layers, of loads ``[L, E]``: ``[2]``.

    The first one is that of experts, the second one that of the ranks of expert parallelism.
    """
    n_experts = loads.shape[1]
    starts = [part * n_experts // ep for part in range(ep + 1)]
    by_rank = torch.stack([loads[:, a:b].sum(1) for a, b in zip(starts, starts[1:], strict=False)], 1)
    return torch.stack([(some.amax(1) / some.mean(1).clamp(min=1.0)).mean() for some in (loads, by_rank)])


def z_loss(logits: Tensor) -> Tensor:
    """Return the sum over tokens of the squared log-sum-exp of ``[t, E]`` logits (ST-MoE, arXiv 2202.08906, eq. 5)."""
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
    """Return ``x``; a backward pass through it also differentiates ``loss``, with gradient 1."""
    return _AddLoss.apply(x, loss)
