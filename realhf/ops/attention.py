"""Causal attention over packed rows, and of one new token per slot over a cache. Grouped heads are never expanded."""

from collections.abc import Sequence
from itertools import groupby

import torch
import torch.nn.functional as F
from torch import Tensor


def packed_attention(q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int]) -> Tensor:
    """Attend causally within each row; no padding, no mask, no copy of the inputs.

    ``q`` is ``[T, H, d]``, ``k`` and ``v`` ``[T, K, d]`` with H a multiple of K; rows follow one another. Neighbours
    of equal length form one dense batch, so rows sorted by length cost fewest calls; any order is right.
    Returns ``[T, H, d]``.
    """
    runs = [(len(list(group)), length) for length, group in groupby(lengths) if length]
    if not runs:
        return q
    if len(runs) == 1:
        return _dense(q, k, v, *runs[0])
    sizes = [n * length for n, length in runs]
    parts = zip(q.split(sizes), k.split(sizes), v.split(sizes), runs, strict=True)  # split: one cat in the backward
    return torch.cat([_dense(qs, ks, vs, *run) for qs, ks, vs, run in parts])


def _dense(q: Tensor, k: Tensor, v: Tensor, n: int, length: int) -> Tensor:
    """``n`` rows of one length, viewed as ``[n, heads, length, d]``."""
    q_, k_, v_ = (x.unflatten(0, (n, length)).transpose(1, 2) for x in (q, k, v))
    out = F.scaled_dot_product_attention(q_, k_, v_, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
    return out.transpose(1, 2).reshape(q.shape)


def decode_bias(positions: Tensor, longest: int, n_kv_heads: int) -> Tensor:
    """Return ``[S*K, 1, longest]`` float32: 0 up to each slot's position, minus infinity after it."""
    after = torch.arange(longest, device=positions.device) > positions[:, None]
    bias = torch.zeros(after.shape, device=positions.device).masked_fill_(after, float("-inf"))
    return bias.repeat_interleave(n_kv_heads, 0).unsqueeze(1)


def decode_attention(q: Tensor, k: Tensor, v: Tensor, positions: Tensor, bias: Tensor | None = None) -> Tensor:
    """Attend from one token per slot to cache places 0..position.

    ``q`` is ``[S, H, d]``; ``k`` and ``v`` are a contiguous cache ``[S, K, Lmax, d]``; ``positions`` is ``[S]``. One
    matrix product per key/value head over the filled part of the cache. ``bias`` is ``decode_bias`` in q's type, which
    layers of one step share; without it the longest position is read from the device. Returns ``[S, H, d]``.
    """
    slots, heads, dim = q.shape
    n_kv = k.shape[1]
    if bias is None:
        bias = decode_bias(positions, int(positions.max()) + 1 if slots else 0, n_kv).to(q.dtype)
    longest = bias.shape[-1]
    k_, v_ = (x[:, :, :longest].view(slots * n_kv, longest, dim) for x in (k, v))
    scores = torch.baddbmm(bias, q.reshape(slots * n_kv, heads // n_kv, dim), k_.transpose(1, 2), alpha=dim**-0.5)
    return torch.bmm(scores.softmax(-1), v_).view(slots, heads, dim)
