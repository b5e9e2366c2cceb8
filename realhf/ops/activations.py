"""MLP activations, optionally gated, with one pass over memory in each direction."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from realhf.api.model_config import CLAMPED_SWIGLU, KERNEL_ACTIVATIONS
from realhf.ops import extension

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
    "relu6": F.relu6,
    "leaky_relu": F.leaky_relu,
    "mish": F.mish,
    "hardswish": F.hardswish,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
}
CLAMP = 7.0
"""The limit of ``CLAMPED_SWIGLU``."""
ACTIVATION_IDS = {name: number for number, name in enumerate(KERNEL_ACTIVATIONS)}


def activate(x: Tensor, activation: str, gated: bool) -> Tensor:
    """Return ``f(x)`` or, gated, ``f(gate) * up`` with ``x = [gate, up]`` (arXiv 2002.05202, section 2).

    ``x`` is ``[T, inner]`` or, gated, ``[T, 2 * inner]``; the result is ``[T, inner]``. The kernel takes float32 and
    bfloat16, computes ``KERNEL_ACTIVATIONS`` in float32, and saves only ``x`` for the backward pass.
    """
    fits = x.dtype in (torch.float32, torch.bfloat16) and activation in ACTIVATION_IDS
    kernel = extension.kernel("activate", x.device.type) if fits else None
    if kernel is None:
        return activate_reference(x, activation, gated)
    if torch.is_grad_enabled() and x.requires_grad:
        return _Activate.apply(x, activation, gated)
    return kernel(x.contiguous(), ACTIVATION_IDS[activation], gated)


def activate_reference(x: Tensor, activation: str, gated: bool) -> Tensor:
    if not gated:
        return ACTIVATIONS[activation](x)
    gate, up = x.chunk(2, -1)
    if activation == CLAMPED_SWIGLU:
        gate, up = gate.clamp(max=CLAMP), up.clamp(-CLAMP, CLAMP)
        return ACTIVATIONS["quick_gelu"](gate) * (up + 1)
    return ACTIVATIONS[activation](gate) * up


class _Activate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, activation: str, gated: bool) -> Tensor:
        x = x.contiguous()
        ctx.save_for_backward(x)
        ctx.options = ACTIVATION_IDS[activation], gated
        return extension.required("activate", x.device.type)(x, *ctx.options)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        kernel = extension.required("activate_backward", grad.device.type)
        return kernel(grad.contiguous(), *ctx.saved_tensors, *ctx.options), None, None
