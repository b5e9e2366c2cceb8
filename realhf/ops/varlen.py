"""Packed attention on GPUs with torch's variable-length flash attention, including rows with a shared prefix.

The keys and values of a shared prefix are gathered in front of each row's own; autograd sums the gradients of copies.
The kernel aligns a row's last query with its last key, as a row with a prefix needs.

torch 2.10 has causal attention alone, 2.11 adds ``scale`` and ``window_size``, 2.12 ``enable_gqa`` and ``seqused_k``.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from inspect import signature
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

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
    """Return True if the kernel can read the first keys of a row only, as decoding needs."""
    kernel = _kernel()
    return kernel is not None and "seqused_k" in kernel.parameters


@lru_cache(maxsize=1)
def _kernel() -> VarlenKernel | None:
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:  # torch before 2.10
        return None
    return VarlenKernel(varlen_attn, frozenset(signature(varlen_attn).parameters))


@lru_cache(maxsize=16)  # all layers of a pass share the layout
def varlen_layout(
    lengths: tuple[int, ...], prefixes: tuple[int, ...], device: torch.device
) -> tuple[tuple[Tensor, Tensor, int, int], Tensor | None]:
    """Return the kernel's arguments for the rows of ``rotary_attention``, and the index of gathered keys, ``[T_k]``.

    The index is None without prefixes. Arguments: row offsets ``[B + 1]`` int32 and longest row of queries and keys.
    """
    shared = [lengths[p] if p >= 0 else 0 for p in prefixes] if prefixes else [0] * len(lengths)
    keys = [before + own for before, own in zip(shared, lengths, strict=True)]
    starts = list(accumulate(lengths, initial=0))
    gather = None
    if any(shared):
        indices = []
        for row, (before, own) in enumerate(zip(shared, lengths, strict=True)):
            if before:
                indices.append(torch.arange(starts[prefixes[row]], starts[prefixes[row]] + before))
            indices.append(torch.arange(starts[row], starts[row] + own))
        gather = torch.cat(indices).to(device)
    cu_seqlens = torch.tensor([starts, list(accumulate(keys, initial=0))], dtype=torch.int32).to(device)
    return (cu_seqlens[0], cu_seqlens[1], max(lengths, default=0), max(keys, default=0)), gather


def varlen_attention(
    q: Tensor, k: Tensor, v: Tensor, lengths: tuple[int, ...], prefixes: tuple[int, ...], scale: float, window: int
) -> Tensor:
    """Attend like ``rotary_attention`` from q ``[T, H, d]`` to k, v ``[T, K, d]``; a ``window`` of 0 is unlimited."""
    kernel = _kernel()
    assert kernel is not None, "the caller checks is_supported"
    layout, gather = varlen_layout(lengths, prefixes, q.device)
    if gather is not None:
        k, v = k.index_select(0, gather), v.index_select(0, gather)
    return kernel(q, k, v, layout, scale, window)
