"""All blocks of a stage in one compiled call, for one new token per slot.

Small models are bound by operator overhead in decoding: a block takes thirty operations on little data, here one. The
unfused path of ``Transformer.decode`` is the reference implementation.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count

import torch
import torch.nn.functional as F
from torch import Tensor

from realhf.api.model_config import ModelConfig
from realhf.models.attention.norm_weights import Norm
from realhf.models.attention.stage_rotary import StageRotary
from realhf.models.blocks import Attention, Block, Mlp
from realhf.models.kv_cache import KVCache
from realhf.models.low_rank import LowRank
from realhf.models.quantized_matrix import Matrix, QuantizedMatrix
from realhf.ops import extension
from realhf.ops.activations import ACTIVATION_IDS
from realhf.ops.attention import ScoreParams

TILE_N = 16
"""Output rows per tile of a weight, ``[in, TILE_N]``."""
N_WEIGHTS = 16
"""Of a block."""


@dataclass(frozen=True)
class FusedBlocks:
    """The weights of a stage in the kernel's order, and the score rules of its blocks, which differ in windows.

    The matrices must be ``tiled`` before a call.
    """

    config: ModelConfig
    n_heads: int
    weights: tuple[Tensor, ...]
    rules: tuple[ScoreParams, ...]
    rotary: StageRotary
    adapters: dict[int, LowRank] = field(default_factory=dict)
    """The LoRA adapters of some weights, by their indices, which ``tiled`` merges."""

    def tiled(self) -> "FusedBlocks":
        """Copy the matrices into tiles, the order in which the kernel reads them."""
        merged = (self.adapters[i].merged(w) if i in self.adapters else w for i, w in enumerate(self.weights))
        return replace(self, weights=tuple(pack_tiles(w) if w.dim() == 2 else w for w in merged), adapters={})

    def __call__(self, x: Tensor, positions: Tensor, cache: KVCache, prefixes: Tensor | None, longest: int) -> Tensor:
        """Return the hidden states ``[S, D]`` after all blocks, and after the final norm on the last stage.

        ``x`` is ``[S, D]``, ``positions`` and ``prefixes`` are as for ``Transformer.decode``; positions are
        below ``longest``. Intermediate values are float32 for any type of x.
        """
        config, rule = self.config, self.rules[0]
        kernel = extension.required("decode_blocks", x.device.type)
        return kernel(
            x, self.weights, cache.k, cache.v, positions, prefixes, self.rotary.tables(longest), self.rotary.table_of,
            [rule.window for rule in self.rules], self.n_heads, config.intermediate, ACTIVATION_IDS[config.activation],
            config.mlp == "gated", config.parallel_residual, config.norm == "layer", config.norm_eps,
            config.norm_offset, config.residual_scale, rule.scale_for(config.head_dim), rule.softcap,
            *config.query_growth,
        )  # fmt: skip


def fuse_blocks(
    config: ModelConfig,
    n_heads: int,
    blocks: Sequence[Block],
    final_norm: Norm | None,
    rules: tuple[ScoreParams, ...],
    rotary: StageRotary,
) -> FusedBlocks | None:
    """Return the blocks for the fused kernel; None without a kernel for this model and device.

    The kernel runs on CPU. In bfloat16, torch's products are faster on CPUs with bfloat16 instructions, and adapters
    are not merged, since small ones would be rounded away. Tiles of quantized weights would need the memory that
    quantization saves.
    """
    attention = blocks[0].attention
    first = attention.wqkv if isinstance(attention, Attention) else None
    if first is None or isinstance(first, QuantizedMatrix) or not config.is_fusable:
        return None
    adapters = dict(_adapters(blocks))
    fits_bf16 = first.dtype == torch.bfloat16 and not _has_bf16_instructions() and not adapters
    fits = first.dtype == torch.float32 or fits_bf16
    if not fits or extension.kernel("decode_blocks", first.device.type) is None:
        return None
    weights = [weight for block in blocks for weight in _weights(block)]
    weights += [final_norm.weight, final_norm.bias] if final_norm else [None, None]
    none = first.new_empty(0)
    tensors = tuple(none if w is None else w.detach() for w in weights if not isinstance(w, QuantizedMatrix))
    return FusedBlocks(config, n_heads, tensors, rules, rotary, adapters)


def _adapters(blocks: Sequence[Block]) -> Iterator[tuple[int, LowRank]]:
    """Yield the adapters and the indices of their weights, as ``_weights`` orders them."""
    for start, block in zip(count(0, N_WEIGHTS), blocks, strict=False):
        attention, mlp = block.attention, block.mlp
        assert isinstance(mlp, Mlp) and isinstance(attention, Attention), "``is_fusable`` checks this"
        adapters = (attention.qkv_adapter, attention.o_adapter, mlp.up_adapter, mlp.down_adapter)
        for index, adapter in zip((2, 6, 11, 13), adapters, strict=True):
            if adapter is not None:
                yield start + index, adapter


def _weights(block: Block) -> list[Matrix | None]:
    attention, mlp = block.attention, block.mlp
    assert isinstance(mlp, Mlp) and isinstance(attention, Attention)
    assert attention.norm is not None and mlp.norm is not None, "``is_fusable`` checks this"
    q_norm, k_norm, attention_post_norm, mlp_post_norm = (
        None if norm is None else norm.weight
        for norm in (attention.q_norm, attention.k_norm, attention.post_norm, mlp.post_norm)
    )
    return [
        attention.norm.weight, attention.norm.bias, attention.wqkv, attention.bqkv, q_norm, k_norm,
        attention.wo, attention.bo, attention_post_norm,
        mlp.norm.weight, mlp.norm.bias, mlp.up, mlp.b_up, mlp.down, mlp.b_down, mlp_post_norm,
    ]  # fmt: skip


def pack_tiles(weight: Tensor) -> Tensor:
    """Copy a matrix ``[out, in]`` to ``[ceil(out / TILE_N), in, TILE_N]``, padded with zeros."""
    padded = F.pad(weight, (0, 0, 0, -len(weight) % TILE_N))
    return padded.view(-1, TILE_N, weight.shape[1]).transpose(1, 2).contiguous()


def tiled_linear(x: Tensor, tiles: Tensor, n_outs: int) -> Tensor:
    """Return ``x`` ``[S, in]`` times the transpose of a tiled matrix, ``[S, n_outs]`` float32."""
    return extension.required("tiled_linear", x.device.type)(x, tiles, n_outs)


def _has_bf16_instructions() -> bool:
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
