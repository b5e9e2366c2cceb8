"""One block of the decoder: attention, then an MLP or routed experts, with the switches of all families.

Weights come bound (views of the flat parameters); what attention looks at and where tokens are is told by ``Pass``.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from realhf.api.model_config import ModelConfig
from realhf.comm.tensor_parallel import TensorParallelRegion
from realhf.ops.activations import activate
from realhf.ops.moe import (
    add_loss,
    balance_loss,
    combine,
    dispatch,
    grouped_linear,
    route,
    sort_by_expert,
    z_loss,
)
from realhf.ops.norms import layer_norm, rms_norm

Attend = Callable[[int, Tensor], Tensor]
"""From the number of a block in its stage and its queries, keys and values ``[T, H + 2K, d]``, which have not turned by
their positions yet, to the mixed values ``[T, H, d]``."""


@dataclass(frozen=True)
class Norm:
    """A norm over the last dimension; ``offset`` is added to the weight of an RMS norm."""

    weight: Tensor
    bias: Tensor | None
    eps: float
    offset: float

    def __call__(self, x: Tensor) -> Tensor:
        if self.bias is not None:
            return layer_norm(x, self.weight, self.bias, self.eps)
        return rms_norm(x, self.weight, self.eps, self.offset)


@dataclass(frozen=True)
class Attention:
    """Weights of attention; query, key and value are one matrix."""

    norm: Norm
    wqkv: Tensor
    bqkv: Tensor | None
    q_norm: Norm | None
    k_norm: Norm | None
    wo: Tensor
    bo: Tensor | None
    post_norm: Norm | None


@dataclass(frozen=True)
class Mlp:
    """Weights of a dense MLP; gate and up are one matrix."""

    norm: Norm
    up: Tensor
    b_up: Tensor | None
    down: Tensor
    b_down: Tensor | None
    post_norm: Norm | None


@dataclass(frozen=True)
class Experts:
    """Weights of routed experts: router ``[E, D]``, up ``[E, 2, wide, D]`` (gate and up), down ``[E, D, wide]``."""

    norm: Norm
    router: Tensor
    up: Tensor
    down: Tensor
    post_norm: Norm | None


@dataclass(frozen=True)
class Block:
    attention: Attention
    mlp: Mlp | Experts


@dataclass(frozen=True)
class RouterLoss:
    """Add the router's losses to what is trained: token t is in row ``rows[t]`` of ``n_rows`` and counts ``weight``."""

    rows: Tensor
    n_rows: int
    weight: float


@dataclass(frozen=True)
class ForwardContext:
    """What the blocks of one pass over some tokens share. ``n_q`` and ``n_kv`` are the heads of this shard."""

    config: ModelConfig
    n_q: int
    n_kv: int
    seams: TensorParallelRegion
    attend: Attend
    router_loss: RouterLoss | None = None


def run_block(block: Block, index: int, x: Tensor, step: ForwardContext) -> tuple[Tensor, Tensor | None]:
    """Return the hidden states ``[T, D]`` behind a block, and what its router lost; ``index`` is its place here.

    The latter are sums over my tokens, ``[2]``: ``balance_loss`` and ``z_loss``; None without a router in training.
    """
    after = _attention(block.attention, index, x, block.attention.norm(x), step)
    inner = block.mlp.norm(x if step.config.parallel_residual else after)
    if isinstance(block.mlp, Experts):
        return _experts(block.mlp, after, inner, step)
    return _mlp(block.mlp, after, inner, step), None


def _attention(attention: Attention, index: int, x: Tensor, inner: Tensor, step: ForwardContext) -> Tensor:
    n_q, n_kv, head_dim = step.n_q, step.n_kv, step.config.head_dim
    qkv = F.linear(step.seams.copy_to_tp(inner), attention.wqkv, attention.bqkv).view(-1, n_q + 2 * n_kv, head_dim)
    if attention.q_norm is not None and attention.k_norm is not None:
        q, k, v = qkv.split((n_q, n_kv, n_kv), 1)
        qkv = torch.cat(
            (_head_norm(attention.q_norm, q, step.seams), _head_norm(attention.k_norm, k, step.seams), v), 1
        )
    mixed = step.attend(index, qkv).flatten(1, 2)
    return _add_product(x, mixed, attention.wo, attention.bo, attention.post_norm, step.seams)


def _head_norm(norm: Norm, x: Tensor, seams: TensorParallelRegion) -> Tensor:
    """Normalise each head.

    Every worker sees its own heads alone, so the weight's gradient is summed: here, or where tokens are shared out with
    that of everything that is not cut.
    """
    weight = norm.weight if seams.sequence else seams.copy_to_tp(norm.weight)
    return rms_norm(x.reshape(-1, x.shape[-1]), weight, norm.eps, norm.offset).view(x.shape)


def _mlp(mlp: Mlp, x: Tensor, inner: Tensor, step: ForwardContext) -> Tensor:
    wide = _activated(F.linear(step.seams.copy_to_tp(inner), mlp.up, mlp.b_up), step.config)
    return _add_product(x, wide, mlp.down, mlp.b_down, mlp.post_norm, step.seams)


def _activated(wide: Tensor, config: ModelConfig) -> Tensor:
    return activate(wide, config.activation, config.mlp == "gated")


def _experts(experts: Experts, x: Tensor, inner: Tensor, step: ForwardContext) -> tuple[Tensor, Tensor | None]:
    """Route my tokens, then compute all tokens of the group with my part of every expert."""
    config, seams = step.config, step.seams
    logits = F.linear(inner, experts.router)
    probs, weights, chosen = route(logits, config.experts_per_token, config.renormalise_experts)
    chosen = seams.all_gather_tokens(chosen)
    by = sort_by_expert(chosen, config.n_experts)
    wide = _activated(grouped_linear(dispatch(seams.copy_to_tp(inner), by), experts.up.flatten(1, 2), by), config)
    partial = combine(grouped_linear(wide, experts.down, by), seams.copy_to_tp(weights), by)
    after = _add(x, partial, None, experts.post_norm, seams)
    if (told := step.router_loss) is None:
        return after, None
    balance, z = balance_loss(probs, chosen, told.rows, told.n_rows, seams.local_tokens), z_loss(logits)
    # this layer's share of the mean over routed layers and over all tokens of the step
    loss = (config.balance_loss * balance + config.z_loss * z) * (told.weight / len(config.routed_layers))
    return add_loss(after, loss), torch.stack((balance, z)).detach()


def _add_product(
    x: Tensor, inner: Tensor, weight: Tensor, bias: Tensor | None, post_norm: Norm | None, seams: TensorParallelRegion
) -> Tensor:
    """``x + inner @ weight.T + bias``; the product is summed over the group where rows of the weight are cut."""
    if seams.group.size > 1 or post_norm is not None:
        return _add(x, F.linear(inner, weight), bias, post_norm, seams)
    if bias is None:
        return torch.addmm(x, inner, weight.t())  # the sum inside the product
    return x + F.linear(inner, weight, bias)


def _add(
    x: Tensor, partial: Tensor, bias: Tensor | None, post_norm: Norm | None, seams: TensorParallelRegion
) -> Tensor:
    whole = seams.reduce_from_tp(partial)
    if bias is not None:
        whole = whole + bias
    return x + (whole if post_norm is None else post_norm(whole))
