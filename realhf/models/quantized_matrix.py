"""Matrices of integers with a scale per group of columns, and products with them. Integers are those of torchao."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class QuantizedMatrix:
    """A frozen matrix ``[out, in]``: each weight is an integer times the scale of its group of adjacent columns.

    ``scales`` are ``[out, in / group]``, in the type of the weights. ``integers`` are int8: ``[out, in]`` of 8 bits, or
    ``[out, in / 2]`` with two of 4 bits each: byte i of a group has in its low half the i-th integer of the group's
    first half, in its high half the i-th of the second half.
    """

    integers: Tensor
    scales: Tensor
    bits: int

    @property
    def dtype(self) -> torch.dtype:
        return self.scales.dtype

    @property
    def device(self) -> torch.device:
        return self.scales.device

    @staticmethod
    def of(weight: Tensor, bits: int, group_size: int, dtype: torch.dtype) -> "QuantizedMatrix":
        """Quantize ``weight`` ``[out, in]`` symmetrically, rounding scales to ``dtype``. ValueError for NaN and inf."""
        from torchao.quantization import MappingType, choose_qparams_affine, quantize_affine

        weight = weight.to(dtype).float().contiguous()
        block, largest = (1, group_size), 2 ** (bits - 1) - 1
        scales, zeros = choose_qparams_affine(
            weight, MappingType.SYMMETRIC, block, torch.int8, -largest - 1, largest, scale_dtype=dtype
        )
        if not torch.isfinite(scales).all():
            raise ValueError("weights are not finite, or too large to be quantized")
        integers = quantize_affine(weight, block, scales.float(), zeros, torch.int8, -largest - 1, largest)
        packed = integers if bits == 8 else _packed(integers, group_size)
        return QuantizedMatrix(packed, scales.view(len(weight), -1), bits)

    def dequantized(self) -> Tensor:
        """Return the weights ``[out, in]``. Each is rounded once: products of integers and scales are."""
        rows, n_groups = self.scales.shape
        if self.bits == 8:
            weights = self.integers.to(self.dtype).view(rows, n_groups, -1)
        else:
            packed = self.integers.view(rows, n_groups, 1, -1)
            weights = torch.empty(rows, n_groups, 2, packed.shape[-1], dtype=self.dtype, device=self.device)
            weights[:, :, :1] = (packed << 4) >> 4  # shifts keep the sign
            weights[:, :, 1:] = packed >> 4
            weights = weights.view(rows, n_groups, -1)
        return weights.mul_(self.scales[..., None]).view(rows, -1)


Matrix = Tensor | QuantizedMatrix


def _packed(integers: Tensor, group_size: int) -> Tensor:
    low, high = integers.view(len(integers), -1, 2, group_size // 2).unbind(2)
    return ((high << 4) | (low & 15)).view(len(integers), -1)


def product(x: Tensor, weight: Matrix, bias: Tensor | None) -> Tensor:
    """Return ``x`` ``[T, in]`` times the transpose of ``weight`` ``[out, in]``, plus ``bias``."""
    if isinstance(weight, Tensor):
        return F.linear(x, weight, bias)
    y: Tensor = _Product.apply(x, weight)
    return y if bias is None else y + bias


class _Product(torch.autograd.Function):
    """The product with a quantized matrix. The backward pass dequantizes it again instead of saving its weights."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: QuantizedMatrix) -> Tensor:
        ctx.weight = weight
        return F.linear(x, weight.dequantized())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0] @ ctx.weight.dequantized(), None
