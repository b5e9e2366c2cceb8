"""The weights of the two sublayers of a block, attention and MLP, in the order of the kernel (``csrc/decode.cpp``)."""

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from realhf.api.config.choices import WeightType
from realhf.arch.decode_kernel import fits
from realhf.models.attention.norm_weights import Norm
from realhf.models.blocks import Attention, Experts, LinearAttention, Mlp
from realhf.models.fused.tiles import TILE_N, pack_tiles
from realhf.models.low_rank import LowRank
from realhf.models.quantized_matrix import Matrix, QuantizedMatrix


@dataclass(frozen=True)
class KernelWeight:
    """A view of a weight, None for a missing one; ``packed`` copies matrices.

    Leading dimensions of matrices and vectors number experts. ``padding`` are columns before and behind a vector's.
    A matrix that ``keeps_type`` chooses experts, and is never stored in another type.
    """

    value: Tensor | None
    is_matrix: bool = False
    adapter: LowRank | None = None
    padding: tuple[int, int] = (0, 0)
    keeps_type: bool = False

    def packed(self, missing: Tensor, dtype: WeightType) -> Tensor:
        """Return the weight as the kernel reads it, with its adapter, or ``missing``; ``dtype`` is that of matrices."""
        if self.value is None:
            return missing
        value = self.value.detach()
        if self.is_matrix:
            merged = value if self.adapter is None else self.adapter.merged(value)
            return pack_tiles(merged.flatten(0, -2), WeightType.auto if self.keeps_type else dtype)
        return F.pad(value, self.padding) if any(self.padding) else value


SublayerWeights = tuple[KernelWeight, ...]


def attention_weights(attention: Attention | LinearAttention, with_bias: bool) -> SublayerWeights | None:
    """Return the weights of an attention, None if the kernel does not compute it.

    ``with_bias`` is whether the kernel adds the bias of the last product.
    """
    if isinstance(attention, LinearAttention) or attention.latent is not None:
        return None
    qkv = _product(attention.wqkv, attention.bqkv, attention.qkv_adapter)
    out = _product(attention.wo, attention.bo if with_bias else None, attention.o_adapter)
    if qkv is None or out is None:
        return None
    q_norm, k_norm, post_norm = (_weight_of(norm) for norm in (attention.q_norm, attention.k_norm, attention.post_norm))
    return (*norm_weights(attention.norm), *qkv, q_norm, k_norm, *out, post_norm, KernelWeight(attention.sinks))


def mlp_weights(mlp: Mlp | Experts, hidden: int, with_bias: bool) -> SublayerWeights | None:
    """Return the weights of a dense MLP or of routed experts, None if the kernel does not compute it.

    ``with_bias`` is whether the kernel adds the bias of a dense MLP's last product.
    """
    if isinstance(mlp, Experts):
        return _expert_weights(mlp, hidden)
    up = _product(mlp.up, mlp.b_up, mlp.up_adapter)
    down = _product(mlp.down, mlp.b_down if with_bias else None, mlp.down_adapter)
    if up is None or down is None or not fits(width_of(mlp)):
        return None
    return (*norm_weights(mlp.norm), *up, *down, _weight_of(mlp.post_norm))


def width_of(mlp: Mlp) -> int:
    """Return the width of a dense MLP on this worker, 0 for a quantized one."""
    return 0 if isinstance(mlp.down, QuantizedMatrix) else mlp.down.shape[1]


def _expert_weights(experts: Experts, hidden: int) -> SublayerWeights | None:
    mlps, shared, n_experts = experts.mlps, experts.shared, len(experts.router)
    if mlps.up_adapter is not None or mlps.down_adapter is not None or not fits(mlps.down.shape[2]):
        return None
    shared_up = shared_down = (KernelWeight(None), KernelWeight(None))
    if shared is not None:
        up, down = _product(shared.up, None, None), _product(shared.down, None, None)
        if up is None or down is None or shared.up_adapter or shared.down_adapter or not fits(width_of(shared)):
            return None
        shared_up, shared_down = up, down
    b_up = None if mlps.b_up is None else mlps.b_up.flatten(1)
    columns = (0, 0)
    if mlps.b_down is not None:
        columns = mlps.first_column, hidden - mlps.first_column - mlps.b_down.shape[1]
    return (
        *norm_weights(experts.norm), KernelWeight(mlps.up_rows, True), KernelWeight(b_up),
        KernelWeight(mlps.down, True), KernelWeight(mlps.b_down, padding=columns), _weight_of(experts.post_norm),
        KernelWeight(experts.router, True, keeps_type=True),
        KernelWeight(experts.b_router, padding=(0, -n_experts % TILE_N)),
        KernelWeight(experts.choice_bias),
        shared_up[0], shared_down[0],
        KernelWeight(None if experts.shared_gate is None else experts.shared_gate.flatten()),
    )  # fmt: skip


def _product(
    weight: Matrix | None, bias: Tensor | None, adapter: LowRank | None
) -> tuple[KernelWeight, KernelWeight] | None:
    """Return matrix and bias of a product. Tiles of quantized weights would need the memory that these save."""
    if weight is None or isinstance(weight, QuantizedMatrix):
        return None
    return KernelWeight(weight, True, adapter), KernelWeight(bias)


def norm_weights(norm: Norm | None) -> SublayerWeights:
    return KernelWeight(None if norm is None else norm.weight), KernelWeight(None if norm is None else norm.bias)


def _weight_of(norm: Norm | None) -> KernelWeight:
    return KernelWeight(None if norm is None else norm.weight)
