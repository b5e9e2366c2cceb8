"""Packed attention on GPUs with torch's variable-length flash attention, including rows with a shared prefix.

The keys and values of a shared prefix are gathered in front of each row's own; autograd sums the gradients of copies.
The kernel aligns a row's last query with its last key, as a row with a prefix needs.

torch 2.10 has causal attention alone, 2.11 adds ``scale`` and ``window_size``, 2.12 ``enable_gqa`` and ``seqused_k``.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from realhf.ops.rows import RowLayout

MAX_HEAD_DIM, HEAD_DIM_STEP = 256, 8
MIN_CAPABILITY = (8, 0)


@dataclass(frozen=True)
class VarlenKernel:
    """``torch.nn.attention.varlen.varlen_attn`` and the names of its parameters in the installed torch."""

    function: Callable[..., Any]
    parameters: frozenset[str]

    def accepts(self, head_dim: int, window: int) -> bool:
        has_window = not window or "window_size" in self.parameters
        return has_window and head_dim % HEAD_DIM_STEP == 0 and head_dim <= MAX_HEAD_DIM

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, layout: tuple[Tensor, Tensor, int, int], scale: float, window: int,
        used: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Attend causally to the last ``window`` keys (0: all), of which each row has the first ``used``."""
        has, options = self.parameters, dict[str, Any]()
        if "window_size" in has:
            options["window_size"] = (window - 1 if window else -1, 0)
        else:
            options["is_causal"] = True
        default = q.shape[-1] ** -0.5
        if "scale" in has:
            options["scale"] = scale
        elif scale != default:
            q = q * (scale / default)
        if (groups := q.shape[1] // k.shape[1]) > 1:
            if "enable_gqa" in has:
                options["enable_gqa"] = True
            else:
                k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
        if used is not None:
            options["seqused_k"] = used
        out: Tensor = self.function(q, k, v, *layout, **options)
        return out


def is_available(device: torch.device) -> bool:
    """Return True if the installed torch has the kernel, and the device runs it: Ampere or later."""
    return (
        device.type == "cuda" and _kernel() is not None and torch.cuda.get_device_capability(device) >= MIN_CAPABILITY
    )


def is_supported(
    device: torch.device, dtype: torch.dtype, head_dim: int, softcap: float = 0.0, window: int = 0
) -> bool:
    """Return True if the kernel supports this attention: on a GPU, 16 bits, without a softcap."""
    kernel = _kernel()
    fits = kernel is not None and kernel.accepts(head_dim, window) and dtype.itemsize == 2 and not softcap
    return fits and is_available(device)


def reads_used_lengths() -> bool:
    """Return True if the kernel can read the first keys of a row only, as decoding needs: torch 2.12 or later."""
    kernel = _kernel()
    return kernel is not None and "seqused_k" in kernel.parameters


@lru_cache(maxsize=1)
def _kernel() -> VarlenKernel | None:
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:  # torch before 2.10
        return None
    return VarlenKernel(varlen_attn, frozenset(signature(varlen_attn).parameters))


def varlen_attention(q: Tensor, k: Tensor, v: Tensor, layout: RowLayout, scale: float, window: int) -> Tensor:
    """Attend like ``rotary_attention`` from q ``[T, H, d]`` to k, v ``[T, K, d]``; a ``window`` of 0 is unlimited."""
    kernel = _kernel()
    assert kernel is not None, "the caller checks is_supported"
    if (index := layout.key_index) is not None:
        k, v = k.index_select(0, index), v.index_select(0, index)
    cu_q, cu_k = layout.cu_seqlens
    return kernel(q, k, v, (cu_q, cu_k, max(layout.lengths, default=0), layout.longest), scale, window)


@dataclass(frozen=True)
class CachedRows:
    """One query per slot of a cache of ``max_len`` tokens per slot: offsets ``[S + 1]`` and used lengths ``[S]``."""

    cu_q: Tensor
    cu_k: Tensor
    used: Tensor

    @classmethod
    def of(cls, positions: Tensor, max_len: int) -> "CachedRows":
        offsets = torch.arange(len(positions) + 1, dtype=torch.int32, device=positions.device)
        return cls(offsets, offsets * max_len, positions.int() + 1)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, longest: int, scale: float, window: int) -> Tensor:
        """Attend from q ``[S, H, d]`` to the used keys of k, v ``[slots, max_len, K, d]``, at most ``longest``."""
        kernel = _kernel()
        assert kernel is not None, "the caller checks reads_used_lengths"
        layout = (self.cu_q, self.cu_k, 1, longest)
        return kernel(q, k.flatten(0, 1), v.flatten(0, 1), layout, scale, window, self.used)
