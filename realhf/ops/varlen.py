"""Packed attention on GPUs by torch's kernel for rows of any length (flash attention), shared prompts included.

Rows that continue another one bring its keys and values along: they are gathered before their own, and autograd adds up
what the copies lose. The kernel lines a row's last query up with its last key, which is what continuing means.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

WIDEST = 256
"""Numbers of a head that the kernel takes at the most."""
Kernel = Callable[..., Any]


@dataclass(frozen=True)
class Ragged:
    """Where rows begin and end: ``queries`` and ``keys`` are ``[B + 1]`` int32, ``gather`` is ``[T_k]`` or None."""

    queries: Tensor
    keys: Tensor
    longest_query: int
    longest_key: int
    gather: Tensor | None


def is_available(device: torch.device) -> bool:
    """Tell whether torch has the kernel for this device."""
    return device.type == "cuda" and _kernel() is not None


def suits(q: Tensor, softcap: float) -> bool:
    """Tell whether the kernel computes such attention: on a GPU, in a short type, without a cap."""
    return is_available(q.device) and q.dtype.itemsize == 2 and q.shape[-1] <= WIDEST and not softcap


@lru_cache(maxsize=1)
def _kernel() -> Kernel | None:
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:  # torch before 2.10
        return None
    return varlen_attn


@lru_cache(maxsize=16)  # all layers of a pass ask for the same
def ragged(lengths: tuple[int, ...], prefixes: tuple[int, ...], device: torch.device) -> Ragged:
    """Lay rows out for the kernel; see ``packed_attention`` for lengths and prefixes."""
    shared = [lengths[p] if p >= 0 else 0 for p in prefixes] if prefixes else [0] * len(lengths)
    keys = [before + own for before, own in zip(shared, lengths, strict=True)]
    starts = list(accumulate(lengths, initial=0))
    gather = None
    if any(shared):
        pieces = []
        for row, (before, own) in enumerate(zip(shared, lengths, strict=True)):
            if before:
                pieces.append(torch.arange(starts[prefixes[row]], starts[prefixes[row]] + before))
            pieces.append(torch.arange(starts[row], starts[row] + own))
        gather = torch.cat(pieces).to(device)
    edges = torch.tensor([starts, list(accumulate(keys, initial=0))], dtype=torch.int32).to(device)
    return Ragged(edges[0], edges[1], max(lengths, default=0), max(keys, default=0), gather)


def varlen_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: tuple[int, ...],
    prefixes: tuple[int, ...],
    scale: float,
    window: int,
    kernel: Kernel | None = None,
) -> Tensor:
    """Do ``packed_attention`` for q ``[T, H, d]``, k and v ``[T, K, d]``, and return ``[T, H, d]``.

    A query sees the last ``window`` keys (0: all before it, and its own).
    """
    kernel = kernel or _kernel()
    assert kernel is not None, "``suits`` looked"
    rows = ragged(lengths, prefixes, q.device)
    if rows.gather is not None:
        k, v = k.index_select(0, rows.gather), v.index_select(0, rows.gather)
    out: Tensor = kernel(
        q, k, v, rows.queries, rows.keys, rows.longest_query, rows.longest_key,
        scale=scale, window_size=(window - 1 if window else -1, 0), enable_gqa=q.shape[1] != k.shape[1],
    )  # fmt: skip
    return out
