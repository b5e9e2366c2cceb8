"""The blocks of a stage in a compiled kernel, for one or several new tokens per slot.

Small models are bound by operator overhead in decoding: a block takes thirty operations on little data. Where the
kernel computes all blocks they are one call. Else, and with tensor parallelism, each sublayer of a block, attention or
MLP, is a call or is computed operation by operation, which is also the reference implementation.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from realhf.api.config.choices import WeightType
from realhf.api.model_config import ModelConfig
from realhf.arch.decode_kernel import GATED_ACTIVATIONS, fits, fuses_attention, has_activation
from realhf.comm.expert_parallel import ExpertRegion
from realhf.models.attention.norm_weights import Norm
from realhf.models.attention.stage_rotary import StageRotary
from realhf.models.blocks import (
    Attention,
    Block,
    Experts,
    ForwardContext,
    Mlp,
    Routing,
    add_output,
    routing_rule,
    run_attention,
    run_mlp,
)
from realhf.models.fused.sublayer_weights import (
    SublayerWeights,
    attention_weights,
    mlp_weights,
    norm_weights,
    width_of,
)
from realhf.models.kv_cache import KVCache
from realhf.ops import extension
from realhf.ops.activations import ACTIVATION_IDS
from realhf.ops.attention import ScoreParams

BOTH, ATTENTION, MLP = range(3)
"""The sublayers that a call computes. One alone returns its product, before bias, norm and residual."""
DECODE_DTYPES = (torch.float32, torch.bfloat16)
DECODE_ACTIVATIONS = ACTIVATION_IDS | {name: i for i, name in enumerate(GATED_ACTIVATIONS, len(ACTIVATION_IDS))}


class DecodeStep(NamedTuple):
    """What a decoding step has beside hidden states ``[S, D]``, as for ``Transformer.decode``."""

    positions: Tensor
    cache: KVCache
    prefixes: Tensor | None
    longest: int
    routing: Routing | None
    slots: Tensor | None


@dataclass(frozen=True)
class StageShape:
    """What the kernel knows of a stage beside weights: its heads, and each block's rule of scores.

    ``places`` are those of blocks in the cache, ``routed`` the ones with experts. ``inner`` is the width of dense
    MLPs on this worker, ``routing`` are the numbers about experts.
    """

    config: ModelConfig
    n_heads: int
    rules: tuple[ScoreParams, ...]
    rotary: StageRotary
    places: tuple[int, ...]
    routed: tuple[bool, ...]
    inner: int
    routing: tuple[int, ...]

    def of_blocks(self, longest: int, at: slice = slice(None)) -> tuple[object, ...]:
        """Return the kernels' arguments about blocks of rows up to a length."""
        windows = [rule.window for rule in self.rules[at]]
        return self.rotary.tables(longest), self.rotary.table_of[at], windows, self.routed[at], self.routing

    @property
    def numbers(self) -> tuple[object, ...]:
        """The kernels' arguments about the model."""
        config, rule = self.config, self.rules[0]
        return (
            self.n_heads, self.inner, DECODE_ACTIVATIONS[config.activation], config.mlp == "gated",
            config.parallel_residual, config.norm == "layer", config.attention_gate, config.qk_norm == "full",
            config.norm_eps, config.norm_offset, config.residual_scale, rule.scale_for(config.head_dim), rule.softcap,
            *config.query_growth, config.expert_scale,
        )  # fmt: skip

    def choices(self, step: DecodeStep, blocks: range) -> Tensor | None:
        """Return a tensor for the experts of tokens in the routed ones of ``blocks``, None if they are not recorded."""
        if step.routing is None or not (n_routed := sum(self.routed[blocks.start : blocks.stop])):
            return None
        return torch.empty(n_routed, len(step.positions), self.config.experts_per_token, dtype=torch.int64)

    def call(self, x: Tensor, step: DecodeStep, sublayer: int, blocks: range, weights: Sequence[Tensor]) -> Tensor:
        """Compute sublayers of consecutive blocks, and tell ``step.routing`` the experts of tokens."""
        at = slice(blocks.start, blocks.stop)
        keys, chosen = (step.cache.k, step.cache.v), None if sublayer == ATTENTION else self.choices(step, blocks)
        if sublayer != BOTH:
            place = self.places[blocks.start]
            own = slice(place, place + 1) if sublayer == ATTENTION else slice(0)
            keys = keys[0][own], keys[1][own]
        result: Tensor = extension.required("decode_blocks", x.device.type)(
            x, weights, *keys, step.positions, step.prefixes, step.slots, *self.of_blocks(step.longest, at), chosen,
            sublayer, *self.numbers,
        )  # fmt: skip
        if chosen is not None and step.routing is not None:
            for index, experts in zip((i for i in blocks if self.routed[i]), chosen, strict=True):
                step.routing.record(index, experts)
        return result


@dataclass(frozen=True)
class TiledBlocks:
    """The sublayers of blocks in the kernel's order, which are computed; those without weights are not fused."""

    shape: StageShape
    sublayers: tuple[tuple[tuple[Tensor, ...], tuple[Tensor, ...]], ...]
    final_norm: tuple[Tensor, ...]

    def run(self, x: Tensor, step: DecodeStep) -> Tensor:
        """Return the hidden states ``[S, D]`` after all blocks, and after the final norm on the last stage.

        Intermediate values are float32 for any type of ``x``. The stage must be fused as a whole.
        """
        return self.shape.call(x, step, BOTH, range(len(self.sublayers)), self.weights)

    @property
    def weights(self) -> list[Tensor]:
        """Those of all blocks and of the final norm."""
        return [*chain.from_iterable(chain.from_iterable(self.sublayers)), *self.final_norm]

    def run_sublayers(self, x: Tensor, step: DecodeStep, blocks: Sequence[Block], context: ForwardContext) -> Tensor:
        """Return the hidden states after all blocks, before the final norm; those without kernels get ``context``."""
        for index, (block, (attention, mlp)) in enumerate(zip(blocks, self.sublayers, strict=True)):
            before, here = x, range(index, index + 1)
            if attention and isinstance(block.attention, Attention):
                product = self.shape.call(x, step, ATTENTION, here, attention)
                x = add_output(x, product, block.attention.bo, block.attention.post_norm, context)
            else:
                x = run_attention(block, index, x, context)
            mlp_input = before if context.config.parallel_residual else x
            if mlp:
                product = self.shape.call(mlp_input, step, MLP, here, mlp)
                bias = block.mlp.b_down if isinstance(block.mlp, Mlp) else None
                x = add_output(x, product, bias, block.mlp.post_norm, context)
            else:
                x, _ = run_mlp(block, index, x, mlp_input, context)
        return x


@dataclass(frozen=True)
class FusedBlocks:
    """Views of the weights of a stage for the kernel, by sublayers of blocks; None where operations compute one.

    ``is_whole``: one call computes all blocks.
    """

    shape: StageShape
    sublayers: tuple[tuple[SublayerWeights | None, SublayerWeights | None], ...]
    final_norm: SublayerWeights
    is_whole: bool

    @property
    def computes_attention(self) -> bool:
        """The kernel computes the attention of all blocks."""
        return all(attention is not None for attention, _ in self.sublayers)

    def tiled(self, dtype: WeightType = WeightType.auto) -> TiledBlocks:
        """Copy the matrices into tiles of a type, in the order in which the kernel reads them."""
        weights = chain.from_iterable(some for some in chain.from_iterable(self.sublayers) if some is not None)
        missing = next(part.value for part in weights if part.value is not None).new_empty(0)

        def packed(sublayer: SublayerWeights | None) -> tuple[Tensor, ...]:
            return tuple(part.packed(missing, dtype) for part in sublayer or ())

        sublayers = tuple((packed(attention), packed(mlp)) for attention, mlp in self.sublayers)
        return TiledBlocks(self.shape, sublayers, packed(self.final_norm))


def fuse_blocks(
    config: ModelConfig,
    n_heads: int,
    blocks: Sequence[Block],
    final_norm: Norm | None,
    rules: tuple[ScoreParams, ...],
    rotary: StageRotary,
    places: tuple[int, ...],
    tp: int,
    experts: ExpertRegion | None,
) -> FusedBlocks | None:
    """Return the blocks for the kernel, on one of ``tp`` ranks; None if it computes nothing of this model and device.

    In bfloat16, adapters are not merged, since small ones would be rounded away. Experts whose tokens are exchanged
    with other workers are computed operation by operation.
    """
    device, dtype = blocks[0].attention.wo.device, blocks[0].attention.wo.dtype
    if dtype not in DECODE_DTYPES or not fits(config.hidden) or extension.kernel("decode_blocks", device.type) is None:
        return None
    if (config.lora is not None and dtype == torch.bfloat16) or not has_activation(config):
        return None

    def sublayers(with_bias: bool) -> tuple[tuple[SublayerWeights | None, SublayerWeights | None], ...]:
        own = [attention_weights(block.attention, with_bias) for block in blocks]
        if not fuses_attention(config, tp):
            own = [None] * len(blocks)
        mlps = [mlp_weights(block.mlp, config.hidden, with_bias) for block in blocks]
        if experts is not None and experts.group.size > 1:
            mlps = [None if isinstance(block.mlp, Experts) else mlp for block, mlp in zip(blocks, mlps, strict=True)]
        return tuple(zip(own, mlps, strict=True))

    found = sublayers(True)
    is_whole = tp == 1 and all(sublayer is not None for sublayer in chain.from_iterable(found))
    if not any(sublayer is not None for sublayer in chain.from_iterable(found)):
        return None
    fused = [block.mlp if mlp is not None else None for block, (_, mlp) in zip(blocks, found, strict=True)]
    shape = StageShape(config, n_heads, rules, rotary, places, *_mlp_sizes(config, fused, experts))
    return FusedBlocks(shape, found if is_whole else sublayers(False), norm_weights(final_norm), is_whole)


def tiled_blocks(fused: FusedBlocks | None, dtype: WeightType) -> TiledBlocks | None:
    """Return the blocks in tiles of a type, None if there are none; ValueError for a type that none would have."""
    if fused is None and dtype is not WeightType.auto:
        raise ValueError(f"gen.weight_dtype={dtype.value}: the CPU kernel of decoding does not compute this model")
    return None if fused is None else fused.tiled(dtype)


def _mlp_sizes(
    config: ModelConfig, mlps: Sequence[Mlp | Experts | None], experts: ExpertRegion | None
) -> tuple[tuple[bool, ...], int, tuple[int, ...]]:
    """Return which MLPs are routed, the width of this worker's dense ones, and the kernel's numbers about experts."""
    inner = max((width_of(mlp) for mlp in mlps if isinstance(mlp, Mlp)), default=0)
    routed, numbers = [mlp for mlp in mlps if isinstance(mlp, Experts)], tuple[int, ...]()
    if routed:
        rule, first, shared = routing_rule(config), 0 if experts is None else experts.own.start, routed[0].shared
        numbers = (
            config.n_experts, first, len(routed[0].mlps.up), rule.top_k, *rule.groups, rule.sigmoid, rule.renormalise,
            routed[0].mlps.down.shape[2], 0 if shared is None else width_of(shared),
        )  # fmt: skip
    return tuple(isinstance(mlp, Experts) for mlp in mlps), inner, numbers
