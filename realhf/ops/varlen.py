"""Packed attention on GPUs with torch's variable-length flash attention, including rows with a shared prefix.

The keys and values of a shared prefix are gathered in front of each row's own; autograd sums the gradients of copies.
The kernel aligns a row's last query with its last key, as a row with a prefix needs.
"""

from collections.abc import Callable
from functools import lru_cache
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

MAX_HEAD_DIM = 256


def is_available(device: torch.device) -> bool:
    return device.type == "cuda" and _kernel() is not None


def is_supported(q: Tensor, softcap: float) -> bool:
    """Return True if the kernel supports these queries: on a GPU, 16 bits, without a softcap."""
    return is_available(q.device) and q.dtype.itemsize == 2 and q.shape[-1] <= MAX_HEAD_DIM and not softcap


@lru_cache(maxsize=1)
def _kernel() -> Callable[..., Any] | None:
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:  # torch before 2.10
        return None
    return varlen_attn


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
    window_size = (window - 1 if window else -1, 0)
    return kernel(q, k, v, *layout, scale=scale, window_size=window_size, enable_gqa=q.shape[1] != k.shape[1])
