"""Norms over the last dimension, and rotary position embeddings."""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from realhf.ops import extension

KERNEL_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """Divide each token of ``x`` ``[T, D]`` by its root mean square and scale it by ``weight + offset`` ``[D]``.

    With an offset, 16-bit types are computed in float32: ``1 + weight`` would lose the weight's last bits. The kernel
    takes float32 and saves only ``x`` and ``weight``.
    """
    if offset:
        return rms_norm(x.float(), weight.float() + offset, eps).to(x.dtype)
    kernel = extension.kernel("rms_norm", x.device.type) if x.dtype == weight.dtype == torch.float32 else None
    if kernel is None:
        return F.rms_norm(x, weight.shape, weight, eps)
    if torch.is_grad_enabled():
        return _RmsNorm.apply(x, weight, eps)
    return kernel(x.contiguous(), weight, eps)


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        x = x.contiguous()
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        return extension.required("rms_norm", x.device.type)(x, weight, eps)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        kernel = extension.required("rms_norm_backward", grad.device.type)
        x_grad, weight_grad = kernel(grad.contiguous(), *ctx.saved_tensors, ctx.eps)
        return x_grad, weight_grad, None


def rotary_frequencies(head_dim: int, base: float, scaling: dict[str, Any]) -> Tensor:
    """Return the angle per position of each pair, ``[head_dim / 2]`` float32, with the ``rotary_scaling`` of a model.

    ``linear`` divides frequencies by ``factor`` (arXiv 2306.15595). ``llama3`` and ``yarn`` divide low ones, keep high
    ones, and interpolate between them by wavelength (Llama 3.1) or by index (arXiv 2309.00071, section 3.2).
    ``longrope`` divides each one by its own factor (arXiv 2402.13753). Scaling that depends on the length of a row is
    that of ``ModelConfig.with_fixed_rotary``.
    """
    powers = base ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    frequencies = 1.0 / powers
    match scaling.get("rope_type"):
        case "linear":
            return frequencies / scaling["factor"]
        case "longrope":
            return 1.0 / (torch.tensor(scaling["short_factor"]) * powers)
        case "llama3":
            low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
            rotations = scaling["original_max_position_embeddings"] * frequencies / (2 * math.pi)
            keep = ((rotations - low) / (high - low)).clamp(0, 1)
            return frequencies * (keep + (1 - keep) / scaling["factor"])
        case "yarn":
            keep = 1 - _yarn_ramp(head_dim, base, scaling)
            return 1.0 / (scaling["factor"] * powers) * (1 - keep) + frequencies * keep
    return frequencies


def _yarn_ramp(head_dim: int, base: float, scaling: dict[str, Any]) -> Tensor:
    """Return the weight of the divided frequency of each pair, which grows from 0 to 1 between two pairs."""
    context = scaling["original_max_position_embeddings"]
    first, last = (
        head_dim * math.log(context / (scaling[key] * 2 * math.pi)) / (2 * math.log(base))
        for key in ("beta_fast", "beta_slow")
    )
    if scaling["truncate"]:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    width = last - first or 0.001
    return ((torch.arange(head_dim // 2, dtype=torch.float32) - first) / width).clamp(0, 1)


class Rotary:
    """A table of cosines and signed sines by position, extended on demand.

    With ``max_len`` there are so many positions.
    """

    def __init__(
        self, head_dim: int, base: float, scaling: dict[str, Any], device: torch.device | str, max_len: int = 0
    ) -> None:
        self._max_len = max_len
        self._frequencies = rotary_frequencies(head_dim, base, scaling).to(device)
        self._scale = scaling.get("attention_factor", 1.0)
        self._tables = torch.empty(2, 0, head_dim, device=device)

    def table(self, longest: int) -> Tensor:
        """Return cosines and signed sines, ``[2, L, head_dim]`` float32, with ``L >= longest``.

        Raises ValueError for a row that exceeds ``max_len``.
        """
        if 0 < self._max_len < longest:
            raise ValueError(
                f"a row has {longest} tokens; the rotary scaling of this model has {self._max_len} positions: "
                "rotary_length sets them"
            )
        if longest > self._tables.shape[1]:
            self._tables = self._build(1 << (longest - 1).bit_length())
        return self._tables

    @torch.inference_mode(False)  # autograd may save the tables
    def _build(self, length: int) -> Tensor:
        angles = torch.outer(torch.arange(length, device=self._frequencies.device).float(), self._frequencies)
        cos, sin = angles.cos() * self._scale, angles.sin() * self._scale
        return torch.stack((torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)))


def rotate(x: Tensor, angles: Tensor, positions: Tensor, rows: Callable[[], Tensor]) -> Tensor:
    """Rotate the pairs ``(i, i + d/2)`` of ``x`` ``[T, heads, d]`` (RoFormer, arXiv 2104.09864).

    Token t is rotated by row ``positions[t]`` of ``angles``, a ``Rotary.table``. If it has fewer dimensions than a
    head, only the first dimensions are rotated. ``rows`` returns the rows of all tokens, for the reference
    implementation; the CUDA kernel computes in float32.
    """
    kernel = extension.kernel("rotate", x.device.type) if x.dtype in KERNEL_DTYPES else None
    if kernel is None:
        return rotate_reference(x, *rows())
    if torch.is_grad_enabled() and x.requires_grad:
        return _Rotate.apply(x, angles, positions)
    return kernel(x, angles, positions, False)


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, angles: Tensor, positions: Tensor) -> Tensor:
        ctx.save_for_backward(angles, positions)
        return extension.required("rotate", x.device.type)(x, angles, positions, False)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        grad = grad if grad.stride(-1) == 1 else grad.contiguous()
        return extension.required("rotate", grad.device.type)(grad, *ctx.saved_tensors, True), None, None


def rotate_reference(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The reference implementation of ``rotate``, with the rows of the table ``[T, 1, d]``."""
    rotary_dim = cos.shape[-1]
    if rotary_dim < x.shape[-1]:
        return torch.cat((rotate_reference(x[..., :rotary_dim], cos, sin), x[..., rotary_dim:]), -1)
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)
