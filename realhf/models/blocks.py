"""One decoder block of any family: attention, then an MLP or routed experts."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from realhf.api.model_config import ModelConfig
from realhf.comm.expert_parallel import ExpertRegion
from realhf.comm.tensor_parallel import TensorParallelRegion
from realhf.models.attention.delta_mixer import DeltaMixer
from realhf.models.attention.latent_attention import LatentProducts
from realhf.models.attention.norm_weights import Norm, norm_heads, norm_projections, normalise
from realhf.models.column_parallel import column_parallel
from realhf.models.low_rank import Dropout, LowRank, linear
from realhf.models.quantized_matrix import Matrix, product
from realhf.models.routed_mlps import RoutedMlps
from realhf.ops.activations import activate
from realhf.ops.moe import RoutingRule, add_loss, balance_loss, route, z_loss


class PassAttention(Protocol):
    """The attention of a pass (``pass_attention.py``); ``block`` is the index of a block in its stage."""

    def __call__(self, block: int, qkv: Tensor) -> Tensor:
        """Map unrotated queries, keys and values ``[T, H + 2K, d]`` to ``[T, H, d]``."""

    def of_latents(self, block: int, q: Tensor, latents: Tensor) -> Tensor:
        """Map unrotated queries ``[T, H, d]`` and latents ``[T, kv_rank + rotary]`` to ``[T, H, value_dim]``."""

    def of_delta(self, block: int, projected: Tensor, region: TensorParallelRegion) -> Tensor:
        """Map the products of a ``DeltaMixer`` to its outputs ``[T, Hv * dv]``."""


@dataclass(frozen=True)
class Attention:
    """Weights of attention; query, key and value are one matrix, or ``latent`` has the products that make them.

    With an output gate, its product is behind the value's. ``qkv_adapter`` and ``o_adapter`` are LoRA's.
    ``sinks`` ``[H]`` are scores of one more key per head, without a value.
    """

    norm: Norm | None
    wqkv: Matrix | None
    bqkv: Tensor | None
    q_norm: Norm | None
    k_norm: Norm | None
    wo: Matrix
    bo: Tensor | None
    post_norm: Norm | None
    qkv_adapter: LowRank | None = None
    o_adapter: LowRank | None = None
    sinks: Tensor | None = None
    latent: LatentProducts | None = None


@dataclass(frozen=True)
class LinearAttention:
    """Weights of a block with the gated delta rule."""

    norm: Norm | None
    mixer: DeltaMixer
    wo: Matrix
    post_norm: Norm | None
    o_adapter: LowRank | None = None


@dataclass(frozen=True)
class Mlp:
    """Weights of a dense MLP; gate and up are one matrix."""

    norm: Norm | None
    up: Matrix
    b_up: Tensor | None
    down: Matrix
    b_down: Tensor | None
    post_norm: Norm | None
    up_adapter: LowRank | None = None
    down_adapter: LowRank | None = None


@dataclass(frozen=True)
class Experts:
    """Weights of a layer with routed experts: router ``[E, D]``, and ``mlps`` for the tokens that it chooses.

    ``shared`` is an MLP for all tokens, without norms, whose output ``shared_gate`` ``[1, D]`` scales. The biases
    ``b_router`` and ``choice_bias`` are ``[E]``.
    """

    norm: Norm | None
    router: Tensor
    mlps: RoutedMlps
    post_norm: Norm | None
    choice_bias: Tensor | None = None
    shared: Mlp | None = None
    shared_gate: Tensor | None = None
    b_router: Tensor | None = None


@dataclass(frozen=True)
class Block:
    attention: Attention | LinearAttention
    mlp: Mlp | Experts

    def ends_token_by_token(self, context: "ForwardContext") -> bool:
        """Return True if after attention nothing, also on other workers, depends on how many tokens are computed."""
        region = context.expert_region
        is_dense = not isinstance(self.mlp, Experts) or (
            context.router_loss is None and context.routing is None and (region is None or region.group.size == 1)
        )
        return is_dense and context.dropout is None


@dataclass(frozen=True)
class RouterLoss:
    """Router losses are added to the training loss: token t is in row ``rows[t]`` of ``n_rows``, with ``weight``.

    The members of the ``region`` divide the tokens.
    """

    rows: Tensor
    n_rows: int
    weight: float
    region: TensorParallelRegion


class Routing(Protocol):
    """Records the experts of the tokens of a pass, or makes it use recorded ones (router replay)."""

    def replayed(self, index: int) -> Tensor | None:
        """Return the experts of this rank's tokens ``[t, k]`` in the block ``index`` of the stage, if known."""

    def record(self, index: int, experts: Tensor) -> None:
        """Take the experts of all tokens, ``[T, k]``."""


def called(function: Callable[..., Any], *inputs: Any) -> Any:
    return function(*inputs)


def recomputed(function: Callable[..., Any], *inputs: Any) -> Any:
    """Call a function, and again in the backward pass instead of saving its intermediate results."""
    return checkpoint(function, *inputs, use_reentrant=False, preserve_rng_state=False)


@dataclass(frozen=True)
class ForwardContext:
    """What the blocks of one forward pass share.

    This shard has ``n_q`` query and ``n_kv`` key/value heads; ``kv_holders`` tensor-parallel ranks have the latter.
    """

    config: ModelConfig
    n_q: int
    n_kv: int
    kv_holders: int
    tp_region: TensorParallelRegion
    attend: PassAttention
    router_loss: RouterLoss | None = None
    routing: Routing | None = None
    dropout: Dropout | None = None
    expert_region: ExpertRegion | None = None
    recomputes_inputs: bool = False
    """Whether the inputs of products, which are norms and activations, are computed again in the backward pass."""

    def product(self, function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        """Return ``function`` of ``inputs``, which ends with a product.

        Recomputation stops before the product: autograd has saved its inputs then, and does not need its result.
        """
        result: Tensor = (recomputed if self.recomputes_inputs else called)(function, *inputs)
        return result


class RouterSums(NamedTuple):
    """Of the local tokens of a layer: the sums of ``balance_loss`` and ``z_loss``, ``[2]``, and experts ``[t, k]``."""

    losses: Tensor
    experts: Tensor

    def add_to(self, total: Tensor) -> None:
        """Add the losses, and the number of tokens of every expert, to ``[2 + E]``."""
        total[:2] += self.losses
        chosen = self.experts.flatten()
        total[2:].scatter_add_(0, chosen, torch.ones_like(chosen, dtype=total.dtype))


def run_block(block: Block, index: int, x: Tensor, context: ForwardContext) -> tuple[Tensor, RouterSums | None]:
    """Return the hidden states ``[T, D]`` after block ``index`` of the stage, and the sums of its router.

    These are None without a router in training.
    """
    return finish_block(block, index, x, mix_values(block, index, x, context), context)


def finish_block(
    block: Block, index: int, x: Tensor, mixed: Tensor, context: ForwardContext
) -> tuple[Tensor, RouterSums | None]:
    """Return what ``run_block`` does, for some tokens ``x`` ``[t, D]`` and their ``mixed`` values ``[t, n]``.

    Tokens do not depend on each other here.
    """
    after = _add_mixed(block, x, mixed, context)
    return run_mlp(block, index, after, x if context.config.parallel_residual else after, context)


def run_attention(block: Block, index: int, x: Tensor, context: ForwardContext) -> Tensor:
    """Return ``x`` ``[T, D]`` plus the attention of its norm."""
    return _add_mixed(block, x, mix_values(block, index, x, context), context)


def mix_values(block: Block, index: int, x: Tensor, context: ForwardContext) -> Tensor:
    """Return the values that attention, or a gated delta rule, mixes for every token, ``[T, n]`` of this shard."""
    if isinstance(block.attention, LinearAttention):
        return _mix_by_delta(block.attention, index, x, context)
    return _mix_by_attention(block.attention, index, x, context)


def _add_mixed(block: Block, x: Tensor, mixed: Tensor, context: ForwardContext) -> Tensor:
    attention = block.attention
    bias = attention.bo if isinstance(attention, Attention) else None
    return _add_product(x, mixed, attention.wo, bias, attention.post_norm, context, attention.o_adapter)


def run_mlp(
    block: Block, index: int, x: Tensor, mlp_input: Tensor, context: ForwardContext
) -> tuple[Tensor, RouterSums | None]:
    """Return ``x`` plus the MLP of the norm of ``mlp_input``, and the sums of its router."""
    if isinstance(block.mlp, Experts):
        return _experts(block.mlp, index, x, normalise(block.mlp.norm, mlp_input), context)
    return _mlp(block.mlp, x, mlp_input, context), None


def _mix_by_attention(attention: Attention, index: int, x: Tensor, context: ForwardContext) -> Tensor:
    n_q, n_kv, config, tp_region = context.n_q, context.n_kv, context.config, context.tp_region
    if attention.latent is not None:
        q, latents = attention.latent.project(normalise(attention.norm, x), config, tp_region, context.dropout)
        return context.attend.of_latents(index, q, latents).flatten(1, 2)

    def project(x: Tensor) -> Tensor:
        assert attention.wqkv is not None
        inner, adapter = normalise(attention.norm, x), attention.qkv_adapter
        return column_parallel(tp_region, inner, attention.wqkv, attention.bqkv, adapter, context.dropout)

    qkv = context.product(project, x) if attention.norm is not None else project(x)
    qkv = qkv.unflatten(1, (-1, config.head_dim))
    gates = None
    if config.attention_gate:
        qkv, gates = qkv.split((n_q + 2 * n_kv, n_q), 1)
    if attention.q_norm is not None and attention.k_norm is not None:
        q, k, v = qkv.split((n_q, n_kv, n_kv), 1)
        if config.qk_norm == "head" or tp_region.group.size == 1:
            q, k = (norm_heads(*pair, tp_region) for pair in ((attention.q_norm, q), (attention.k_norm, k)))
        else:
            norms = attention.q_norm, attention.k_norm
            q, k = norm_projections(norms, q, k, config, tp_region, context.kv_holders)
        qkv = torch.cat((q, k, v), 1)
    mixed = context.attend(index, qkv).flatten(1, 2)
    return mixed if gates is None else mixed * gates.flatten(1).sigmoid()


def _mix_by_delta(attention: LinearAttention, index: int, x: Tensor, context: ForwardContext) -> Tensor:
    region, mixer = context.tp_region, attention.mixer

    def project(x: Tensor) -> Tensor:
        inner = normalise(attention.norm, x)
        return column_parallel(region, inner, mixer.w_in, None, mixer.adapter, context.dropout)

    projected = context.product(project, x) if attention.norm is not None else project(x)
    return context.attend.of_delta(index, projected, region)


def _mlp(mlp: Mlp, x: Tensor, mlp_input: Tensor, context: ForwardContext) -> Tensor:
    """Return ``x`` plus the MLP of the norm of ``mlp_input``."""
    config = context.config

    def expand(inner: Tensor) -> Tensor:
        inner = normalise(mlp.norm, inner)
        return column_parallel(context.tp_region, inner, mlp.up, mlp.b_up, mlp.up_adapter, context.dropout)

    def activated(wide: Tensor) -> Tensor:
        return activate(wide, config.activation, config.mlp == "gated")

    wide = context.product(expand, mlp_input) if mlp.norm is not None else expand(mlp_input)
    if context.recomputes_inputs:

        def contract(wide: Tensor) -> Tensor:
            return linear(activated(wide), mlp.down, None, mlp.down_adapter, context.dropout)

        return add_output(x, context.product(contract, wide), mlp.b_down, mlp.post_norm, context)
    return _add_product(x, activated(wide), mlp.down, mlp.b_down, mlp.post_norm, context, mlp.down_adapter)


def _experts(
    experts: Experts, index: int, x: Tensor, inner: Tensor, context: ForwardContext
) -> tuple[Tensor, RouterSums | None]:
    """Route the local tokens, then compute this shard of every expert for all tokens of the group."""
    config, tp_region, router_loss = context.config, context.tp_region, context.router_loss
    logits = F.linear(inner, experts.router, experts.b_router)
    replayed = context.routing.replayed(index) if context.routing is not None else None
    probs, weights, chosen = route(logits, routing_rule(config), experts.choice_bias, replayed)
    all_chosen, all_tokens = tp_region.all_gather_tokens(chosen), tp_region.copy_to_tp(inner)
    if context.routing is not None:
        context.routing.record(index, all_chosen)
    activation = partial(activate, activation=config.activation, gated=config.mlp == "gated")
    all_weights = tp_region.copy_to_tp(weights)
    output = experts.mlps(all_tokens, all_weights, all_chosen, activation, context.expert_region)
    if experts.shared is not None:
        output = output + _shared_expert(experts.shared, experts.shared_gate, inner, all_tokens, context)
    after = add_output(x, output, None, experts.post_norm, context)
    if router_loss is None:
        return after, None
    if (region := router_loss.region) is not tp_region:  # context parallelism
        all_chosen = region.all_gather_tokens(chosen)
    balance = balance_loss(probs, all_chosen, router_loss.rows, router_loss.n_rows, region.local(router_loss.rows))
    z = z_loss(logits)
    # this layer's share of the mean over routed layers and over all tokens of the step
    loss = (config.balance_loss * balance + config.z_loss * z) * (router_loss.weight / len(config.routed_layers))
    return add_loss(after, loss), RouterSums(torch.stack((balance, z)).detach(), chosen)


@lru_cache(maxsize=64)
def routing_rule(config: ModelConfig) -> RoutingRule:
    is_sigmoid = config.expert_scores == "sigmoid"
    return RoutingRule(
        config.experts_per_token, config.renormalise_experts, is_sigmoid, config.expert_groups, config.expert_scale
    )


def _shared_expert(mlp: Mlp, gate: Tensor | None, inner: Tensor, all_tokens: Tensor, context: ForwardContext) -> Tensor:
    """Return this shard's part of the shared expert for ``all_tokens``; ``inner`` are the local ones."""
    wide = activate(linear(all_tokens, mlp.up, mlp.b_up, None, None), context.config.activation, gated=True)
    partial = linear(wide, mlp.down, None, None, None)
    if gate is None:
        return partial
    return partial * context.tp_region.copy_to_tp(F.linear(inner, gate).sigmoid())


def _add_product(
    x: Tensor,
    inner: Tensor,
    weight: Matrix,
    bias: Tensor | None,
    post_norm: Norm | None,
    context: ForwardContext,
    adapter: LowRank | None,
) -> Tensor:
    """Return ``x + inner @ weight.T + bias``; the product is summed over the group if the weight is sharded."""
    if context.tp_region.group.size > 1 or post_norm is not None or context.config.residual_scale != 1:
        return add_output(x, linear(inner, weight, None, adapter, context.dropout), bias, post_norm, context)
    if bias is None and isinstance(weight, Tensor):
        x = torch.addmm(x, inner, weight.t())  # with the residual addition
    else:
        x = x + product(inner, weight, bias)
    return x if adapter is None else adapter.add_to(x, inner, context.dropout)


def add_output(
    x: Tensor, partial: Tensor, bias: Tensor | None, post_norm: Norm | None, context: ForwardContext
) -> Tensor:
    """Return ``x`` plus a sublayer's output: the sum of ``partial`` over tensor-parallel ranks, with bias and norm."""
    output = context.tp_region.reduce_from_tp(partial)
    if bias is not None:
        output = output + bias
    return torch.add(x, normalise(post_norm, output), alpha=context.config.residual_scale)
