"""All blocks of a stage in one compiled call, for one new token per slot; ``Transformer.decode`` is its twin.

A decoding step of a small model is thirty operations per block on little data; here it is one.
"""

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from realhf.api.model_config import ModelConfig
from realhf.models.blocks import Block, Mlp, Norm
from realhf.models.kv_cache import KVCache
from realhf.ops import extension
from realhf.ops.activations import ACTIVATION_IDS
from realhf.ops.attention import ScoreParams

TILE_N = 16
"""Outputs of a matrix that lie beside one another in a panel, ``[in, PANEL]``."""


@dataclass(frozen=True)
class FusedBlocks:
    """The weights of a stage as the kernel wants them. ``rules`` are those of its blocks, which differ in windows."""

    config: ModelConfig
    n_heads: int
    weights: tuple[Tensor, ...]
    rules: tuple[ScoreParams, ...]

    def tiled(self) -> "TiledBlocks":
        """Copy the matrices in the order in which a product reads them."""
        return TiledBlocks(replace(self, weights=tuple(pack_tiles(w) if w.dim() == 2 else w for w in self.weights)))


@dataclass(frozen=True)
class TiledBlocks:
    """Blocks whose matrices lie in panels, ready to be computed."""

    blocks: FusedBlocks

    def __call__(
        self, x: Tensor, positions: Tensor, cache: KVCache, prefixes: Tensor | None, angles: Tensor | None
    ) -> Tensor:
        """Return the hidden states ``[S, D]`` behind all blocks, and the final norm where the stage has it.

        ``x`` is ``[S, D]`` before them, ``positions`` and ``prefixes`` are as for ``Transformer.decode``, ``angles``
        are ``Rotary.table``. Inner values are float32 whatever the type of x.
        """
        blocks = self.blocks
        config, rule = blocks.config, blocks.rules[0]
        kernel = extension.kernel("decode_blocks", x.device.type)
        assert kernel is not None, "``fused`` looked"
        out: Tensor = kernel(
            x, blocks.weights, cache.k, cache.v, positions, prefixes, angles, [rule.window for rule in blocks.rules],
            blocks.n_heads, config.intermediate, ACTIVATION_IDS[config.activation], config.mlp == "gated",
            config.parallel_residual, config.norm_eps, config.norm_offset, rule.scale_for(config.head_dim),
            rule.softcap,
        )  # fmt: skip
        return out


def fused(
    config: ModelConfig, n_heads: int, blocks: tuple[Block, ...], final_norm: Norm | None, rules: tuple[ScoreParams, ...]
) -> FusedBlocks | None:
    """Return the blocks as one call; None where there is no kernel for them.

    There is one on CPU for dense blocks that are not cut, of sizes that fill its registers. In bfloat16 torch's own
    products are faster where the CPU has instructions for them.
    """
    first = blocks[0].attention.wqkv
    fits = (
        extension.kernel("decode_blocks", first.device.type) is not None
        and config.is_fusable
        and (first.dtype == torch.float32 or (first.dtype == torch.bfloat16 and not _computes_short()))
    )
    if not fits:
        return None
    none = first.new_empty(0)

    def parts(block: Block) -> tuple[Tensor | None, ...]:
        attention, mlp = block.attention, block.mlp
        assert isinstance(mlp, Mlp)
        return (
            attention.norm.weight, attention.norm.bias, attention.wqkv, attention.bqkv, _weight(attention.q_norm),
            _weight(attention.k_norm), attention.wo, attention.bo, _weight(attention.post_norm),
            mlp.norm.weight, mlp.norm.bias, mlp.up, mlp.b_up, mlp.down, mlp.b_down, _weight(mlp.post_norm),
        )  # fmt: skip

    last = (final_norm.weight, final_norm.bias) if final_norm else (None, None)
    found = [*(part for block in blocks for part in parts(block)), *last]
    return FusedBlocks(config, n_heads, tuple(none if part is None else part.detach() for part in found), rules)


def pack_tiles(weight: Tensor) -> Tensor:
    """Copy a matrix ``[out, in]`` as ``[ceil(out / PANEL), in, PANEL]``; behind the last output are zeros."""
    whole = F.pad(weight, (0, 0, 0, -len(weight) % TILE_N))
    return whole.view(-1, TILE_N, weight.shape[1]).transpose(1, 2).contiguous()


def tiled_linear(x: Tensor, panels: Tensor, n_outs: int) -> Tensor:
    """Return ``x`` ``[S, in]`` times the transpose of a matrix in panels, ``[S, n_outs]`` float32."""
    kernel = extension.kernel("tiled_linear", x.device.type)
    assert kernel is not None, "panels are made where there are fused blocks"
    out: Tensor = kernel(x, panels, n_outs)
    return out


def _weight(norm: Norm | None) -> Tensor | None:
    return None if norm is None else norm.weight


def _computes_short() -> bool:
    """Tell whether this CPU multiplies bfloat16."""
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
