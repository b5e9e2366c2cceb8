"""The causal convolution of each channel over packed rows, and of one token per slot."""

from typing import Any

import torch
from torch import Tensor

from realhf.ops import extension
from realhf.ops.activations import activate
from realhf.ops.delta.delta_rows import DeltaRows

MAX_TAPS = 16
"""Of a filter, for the kernel."""


def causal_convolution(
    x: Tensor, weight: Tensor, rows: DeltaRows, tails: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Convolve each channel of packed rows ``x`` ``[T, C]`` with its ``weight`` ``[C, 1, kernel]``: ``[T, C]``.

    ``tails`` ``[B, kernel - 1, C]`` are the inputs before the rows; None: zeros. Also returns the last ones of the rows
    if there are tails.
    """
    inputs, places, ends = rows.windows
    before = x.new_zeros(len(rows.lengths) * (rows.kernel - 1), x.shape[1]) if tails is None else tails.flatten(0, 1)
    if not len(x):
        return x, tails
    window = torch.cat((x, before)).index_select(0, inputs)
    wide = window.to(torch.promote_types(x.dtype, torch.float32))
    n_results, taps = len(wide) - rows.kernel + 1, weight[:, 0].to(wide.dtype).unbind(1)
    # faster on CPUs than a grouped convolution and its gradients
    y = sum((wide[i : i + n_results] * tap for i, tap in enumerate(taps)), start=wide.new_zeros(()))
    last = None if tails is None else window.index_select(0, ends.flatten()).unflatten(0, ends.shape)
    return y.to(x.dtype).index_select(0, places), last


def activated_convolution(
    x: Tensor, weight: Tensor, activation: str, rows: DeltaRows, tails: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Return the activation of ``causal_convolution``; the kernel computes silu of rows without ``tails``."""
    fits = tails is None and activation == "silu" and x.shape[1] % 8 == 0 and weight.shape[2] <= MAX_TAPS
    fits = fits and x.dtype == weight.dtype and x.dtype in (torch.float32, torch.bfloat16)
    if fits and extension.kernel("causal_conv_silu", x.device.type) is not None:
        return _ActivatedConvolution.apply(x, weight, rows.table), None
    y, tails = causal_convolution(x, weight, rows, tails)
    return activate(y, activation, gated=False), tails


class _ActivatedConvolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, table: Tensor) -> Tensor:
        x = x.contiguous()
        ctx.save_for_backward(x, weight, table)
        return extension.required("causal_conv_silu", x.device.type)(x, weight, table)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        kernel = extension.required("causal_conv_silu_backward", grad.device.type)
        x_grad, weight_grad = kernel(grad.contiguous(), *ctx.saved_tensors)
        return x_grad, weight_grad.to(grad.dtype), None


def convolution_step(x: Tensor, weight: Tensor, tails: Tensor) -> Tensor:
    """Convolve one token per slot, ``x`` ``[S, C]``, and add it to ``tails`` ``[S, kernel - 1, C]`` in place."""
    window = torch.cat((tails, x[:, None]), 1)
    tails.copy_(window[:, 1:])
    return (window.float() * weight[:, 0].t().float()).sum(1).to(x.dtype)
