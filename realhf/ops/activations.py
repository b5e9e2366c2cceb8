"""What stands between the two products of an MLP: an activation, gated or not, in one pass each way."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from realhf.ops import extension

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
}
NUMBERS = {name: number for number, name in enumerate(ACTIVATIONS)}
"""As kernels know them."""


def activate(wide: Tensor, activation: str, gated: bool) -> Tensor:
    """Return ``f(wide)``, or gated ``f(gate) * up`` of ``wide = [gate, up]`` (arXiv 2002.05202, section 2).

    ``wide`` is ``[T, inner]`` or, gated, ``[T, 2 * inner]``; the result is ``[T, inner]``. The compiled kernel is used
    where there is one for the device and the type (on CPU: float32, and bfloat16 computed in it); the backward pass
    then keeps ``wide`` and nothing else.
    """
    fits = wide.dtype in (torch.float32, torch.bfloat16)
    kernel = extension.kernel("activate", wide.device.type) if fits else None
    if kernel is None:
        return activate_reference(wide, activation, gated)
    if torch.is_grad_enabled() and wide.requires_grad:
        return _Activate.apply(wide, activation, gated)
    return kernel(wide.contiguous(), NUMBERS[activation], gated)


def activate_reference(wide: Tensor, activation: str, gated: bool) -> Tensor:
    """Compute ``activate`` in plain torch."""
    if not gated:
        return ACTIVATIONS[activation](wide)
    gate, up = wide.chunk(2, -1)
    return ACTIVATIONS[activation](gate) * up


class _Activate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, wide: Tensor, activation: str, gated: bool) -> Tensor:
        wide = wide.contiguous()
        ctx.save_for_backward(wide)
        ctx.given = NUMBERS[activation], gated
        kernel = extension.kernel("activate", wide.device.type)
        assert kernel is not None, "``activate`` looked"
        return kernel(wide, *ctx.given)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        kernel = extension.kernel("activate_backward", grad.device.type)
        assert kernel is not None, "both halves are compiled together"
        return kernel(grad.contiguous(), *ctx.saved_tensors, *ctx.given), None, None
