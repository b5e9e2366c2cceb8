"""Causal attention over packed rows, and of one new token per slot over a cache. Grouped heads are never expanded."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from realhf.ops import extension, varlen
from realhf.ops.norms import rotate

BLOCK = 256
"""Queries whose scores exist at once where they are computed in the open."""


@dataclass(frozen=True)
class Scores:
    """How a query rates a key: ``scale * q . k``, through ``c * tanh(x / c)`` where ``softcap`` is c > 0.

    A query sees the last ``window`` keys, its own included; 0: all. A scale of 0 is one over the root of the head size.
    """

    scale: float = 0.0
    window: int = 0
    softcap: float = 0.0

    def scale_for(self, head_dim: int) -> float:
        return self.scale or head_dim**-0.5

    def cap(self, scores: Tensor) -> Tensor:
        return torch.tanh(scores / self.softcap) * self.softcap if self.softcap else scores


PLAIN = Scores()


def packed_attention(
    q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int], rule: Scores = PLAIN, prefixes: Sequence[int] = ()
) -> Tensor:
    """Attend causally within each row; no padding, no mask.

    ``q`` is ``[T, H, d]``, ``k`` and ``v`` ``[T, K, d]`` with H a multiple of K; rows of ``lengths`` tokens follow one
    another. Row i with ``prefixes[i] = p >= 0`` continues row p, which has no prefix itself: it sees all of p's keys
    before its own, and their gradients are summed over all that continue p. Without ``prefixes`` no row has one.
    Returns ``[T, H, d]``. Raises ValueError for lengths and prefixes that make no rows of q.
    """
    return rotary_attention(torch.cat((q, k, v), 1), q.shape[1], k.shape[1], lengths, rule, prefixes)


def rotary_attention(
    qkv: Tensor,
    n_q: int,
    n_kv: int,
    lengths: Sequence[int],
    rule: Scores = PLAIN,
    prefixes: Sequence[int] = (),
    angles: Tensor | None = None,
) -> Tensor:
    """Do ``packed_attention`` with queries, keys and values side by side, ``[T, n_q + 2 * n_kv, d]``.

    Queries and keys turn by their positions in their rows first, where ``angles`` are given (``Rotary.table``). The
    compiled kernel is used where there is one for the device and the type (on CPU: float32, and bfloat16 computed in
    it), on a GPU torch's own for short types, else ``rotary_attention_reference``.
    """
    if qkv.numel() and varlen.suits(qkv, rule.softcap):
        _check_rows(qkv, lengths, prefixes)
        parts = _turned(qkv, n_q, n_kv, lengths, prefixes, angles)
        scale = rule.scale_for(qkv.shape[-1])
        return varlen.varlen_attention(*parts, tuple(lengths), tuple(prefixes), scale, rule.window)
    fits = qkv.dtype in (torch.float32, torch.bfloat16) and qkv.numel() > 0
    if not fits or extension.kernel("packed_attention", qkv.device.type) is None:
        return rotary_attention_reference(qkv, n_q, n_kv, lengths, rule, prefixes, angles)
    table = torch.frombuffer(array("q", (*lengths, *(prefixes or (-1,) * len(lengths)))), dtype=torch.int64)
    try:
        rows = table.view(2, len(lengths))
        given = (rule.scale_for(qkv.shape[-1]), rule.window, rule.softcap)
        out: Tensor = _Attention.apply(qkv, n_q, n_kv, rows, angles, given)
    except RuntimeError:  # the kernel checks, faster than we can; we say what is wrong
        _check_rows(qkv, lengths, prefixes)
        raise
    return out


class _Attention(torch.autograd.Function):
    """The kernels, which read parts of one tensor and write its gradient as one."""

    @staticmethod
    def forward(
        ctx: Any, qkv: Tensor, n_q: int, n_kv: int, rows: Tensor, angles: Tensor | None, rule: tuple[float, int, float]
    ) -> Tensor:
        kernel = extension.kernel("packed_attention", qkv.device.type)
        assert kernel is not None, "``rotary_attention`` looked"
        ctx.sizes, ctx.rule = (n_q, n_kv, n_kv), rule
        out: Tensor
        out, normalisers = kernel(*qkv.split(ctx.sizes, 1), rows, angles, *rule)
        ctx.save_for_backward(qkv, out, normalisers, rows, angles)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        qkv, out, normalisers, rows, angles = ctx.saved_tensors
        kernel = extension.kernel("packed_attention_backward", grad.device.type)
        assert kernel is not None, "both halves are compiled together"
        parts = qkv.split(ctx.sizes, 1)
        return (kernel(grad, *parts, out, normalisers, rows, angles, *ctx.rule), *[None] * 5)


def shares_prefixes(device: torch.device, dtype: torch.dtype, softcap: float = 0.0) -> bool:
    """Tell whether rows that continue one another are faster than rows that repeat what they share."""
    on_gpu = varlen.is_available(device) and dtype.itemsize == 2 and not softcap
    return extension.kernel("packed_attention", device.type) is not None or on_gpu


def _check_rows(q: Tensor, lengths: Sequence[int], prefixes: Sequence[int]) -> None:
    if sum(lengths) != len(q) or min(lengths, default=0) < 0:
        raise ValueError(f"rows of lengths {tuple(lengths)} do not make {len(q)} tokens")
    if prefixes and len(prefixes) != len(lengths):
        raise ValueError(f"{len(prefixes)} prefixes of {len(lengths)} rows")
    for row, prefix in enumerate(prefixes):
        if not -1 <= prefix < len(lengths) or (prefix >= 0 and prefixes[prefix] >= 0):
            raise ValueError(f"row {row} has prefix {prefix}, which is no row without a prefix")


def positions_in_rows(lengths: Sequence[int], prefixes: Sequence[int], device: torch.device) -> Tensor:
    """Return the position of every token, ``[T]``: from 0 on, or behind the row that its own one continues."""
    counts = torch.tensor(lengths, dtype=torch.int64, device=device)
    firsts = counts.cumsum(0) - counts
    if prefixes:
        before = [lengths[prefix] if prefix >= 0 else 0 for prefix in prefixes]
        firsts = firsts - torch.tensor(before, device=device)
    n_tokens = sum(lengths)
    return torch.arange(n_tokens, device=device) - firsts.repeat_interleave(counts, output_size=n_tokens)


def rotary_attention_reference(
    qkv: Tensor,
    n_q: int,
    n_kv: int,
    lengths: Sequence[int],
    rule: Scores = PLAIN,
    prefixes: Sequence[int] = (),
    angles: Tensor | None = None,
) -> Tensor:
    """Compute ``rotary_attention`` in plain torch."""
    _check_rows(qkv, lengths, prefixes)
    return packed_attention_reference(*_turned(qkv, n_q, n_kv, lengths, prefixes, angles), lengths, rule, prefixes)


def _turned(
    qkv: Tensor, n_q: int, n_kv: int, lengths: Sequence[int], prefixes: Sequence[int], angles: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values, the first two turned by their positions."""
    qk, v = qkv.split((n_q + n_kv, n_kv), 1)
    if angles is not None:
        cos, sin = angles[:, positions_in_rows(lengths, prefixes, qkv.device)].to(qkv.dtype).unsqueeze(2)
        qk = rotate(qk, cos, sin)
    q, k = qk.split((n_q, n_kv), 1)
    return q, k, v


def packed_attention_reference(
    q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int], rule: Scores = PLAIN, prefixes: Sequence[int] = ()
) -> Tensor:
    """Compute ``packed_attention`` in plain torch.

    Neighbours of equal length form one dense batch without copies, so rows sorted by length cost fewest calls; any
    order is right. Rows that continue another are computed one by one.
    """
    _check_rows(q, lengths, prefixes)
    if max(prefixes, default=-1) >= 0:
        parts = zip(*(x.split(list(lengths)) for x in (q, k, v)), strict=True)
        return torch.cat(_continued(list(parts), prefixes, rule))
    runs = [(len(list(group)), length) for length, group in groupby(lengths) if length]
    if not runs:
        return q
    if len(runs) == 1:
        return _dense(q, k, v, *runs[0], rule)
    sizes = [n * length for n, length in runs]
    by_run = zip(q.split(sizes), k.split(sizes), v.split(sizes), runs, strict=True)  # split: one cat in the backward
    return torch.cat([_dense(qs, ks, vs, *run, rule) for qs, ks, vs, run in by_run])


def _continued(rows: list[tuple[Tensor, Tensor, Tensor]], prefixes: Sequence[int], rule: Scores) -> list[Tensor]:
    outs = []
    for (q, k, v), prefix in zip(rows, prefixes, strict=True):
        if prefix >= 0:
            k, v = torch.cat((rows[prefix][1], k)), torch.cat((rows[prefix][2], v))
        q_, k_, v_ = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
        outs.append(_block(q_, k_, v_, rule, len(k) - len(q))[0].transpose(0, 1) if len(q) else q)
    return outs


def _dense(q: Tensor, k: Tensor, v: Tensor, n: int, length: int, rule: Scores) -> Tensor:
    """``n`` rows of one length, viewed as ``[n, heads, length, d]``."""
    q_, k_, v_ = (x.unflatten(0, (n, length)).transpose(1, 2) for x in (q, k, v))
    if rule.softcap or 0 < rule.window < length:
        out = _by_blocks(q_, k_, v_, rule)
    else:
        scale = rule.scale_for(q.shape[-1])
        out = F.scaled_dot_product_attention(
            q_, k_, v_, is_causal=True, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
        )
    return out.transpose(1, 2).reshape(q.shape)


def _by_blocks(q: Tensor, k: Tensor, v: Tensor, rule: Scores) -> Tensor:
    """Attend from one block of queries at a time, each to the keys that it can see."""
    length = q.shape[2]
    step = max(BLOCK, rule.window)
    outs = []
    for start in range(0, length, step):
        stop = min(start + step, length)
        first = max(0, start - rule.window + 1) if rule.window else 0
        block = (q[:, :, start:stop], k[:, :, first:stop], v[:, :, first:stop], rule, start - first)
        if rule.softcap and torch.is_grad_enabled():  # keeps no scores for the backward pass
            outs.append(checkpoint(_block, *block, use_reentrant=False, preserve_rng_state=False))
        else:
            outs.append(_block(*block))
    return torch.cat(outs, 2)


def _block(q: Tensor, k: Tensor, v: Tensor, rule: Scores, offset: int) -> Tensor:
    """Attend from queries ``[n, H, Q, d]``, the first of which has its own key at ``offset``, to ``[n, K, S, d]``."""
    behind = torch.arange(q.shape[2], device=q.device)[:, None] + offset - torch.arange(k.shape[2], device=q.device)
    seen = (behind >= 0) & (behind < rule.window) if rule.window else behind >= 0
    scale = rule.scale_for(q.shape[-1])
    if not rule.softcap:
        grouped = q.shape[1] != k.shape[1]
        return F.scaled_dot_product_attention(q, k, v, seen, scale=scale, enable_gqa=grouped)
    groups = q.shape[1] // k.shape[1]
    rows = q.unflatten(1, (-1, groups)).flatten(2, 3)  # [n, K, groups * Q, d]
    scores = rule.cap(rows @ k.transpose(2, 3) * scale).unflatten(2, (groups, -1))
    precise = torch.promote_types(q.dtype, torch.float32)
    shares = scores.masked_fill(~seen, float("-inf")).softmax(-1, dtype=precise).to(q.dtype)
    return (shares.flatten(2, 3) @ v).unflatten(2, (groups, -1)).flatten(1, 2)


def decode_bias(positions: Tensor, longest: int, n_kv_heads: int, window: int = 0) -> Tensor:
    """Return ``[S*K, 1, longest]`` float32: 0 on what each slot's position sees, minus infinity elsewhere."""
    behind = positions[:, None] - torch.arange(longest, device=positions.device)
    hidden = (behind < 0) | (behind >= window) if window else behind < 0
    bias = torch.zeros(hidden.shape, device=positions.device).masked_fill_(hidden, float("-inf"))
    return bias.repeat_interleave(n_kv_heads, 0).unsqueeze(1)


def decode_attention(
    q: Tensor, k: Tensor, v: Tensor, positions: Tensor, bias: Tensor | None = None, rule: Scores = PLAIN
) -> Tensor:
    """Attend from one token per slot to cache places up to its position.

    ``q`` is ``[S, H, d]``; ``k`` and ``v`` are a contiguous cache ``[S, K, Lmax, d]``; ``positions`` is ``[S]``. One
    matrix product per key/value head over the filled part of the cache. ``bias`` is ``decode_bias`` for the rule's
    window in q's type, which layers of one step share; without it the longest position is read from the device.
    Returns ``[S, H, d]``.
    """
    slots, heads, dim = q.shape
    n_kv = k.shape[1]
    if bias is None:
        bias = decode_bias(positions, int(positions.max()) + 1 if slots else 0, n_kv, rule.window).to(q.dtype)
    longest = bias.shape[-1]
    k_, v_ = (x[:, :, :longest].view(slots * n_kv, longest, dim) for x in (k, v))
    grouped, scale = q.reshape(slots * n_kv, heads // n_kv, dim), rule.scale_for(dim)
    if rule.softcap:
        scores = rule.cap(torch.bmm(grouped, k_.transpose(1, 2)) * scale) + bias
    else:
        scores = torch.baddbmm(bias, grouped, k_.transpose(1, 2), alpha=scale)
    return torch.bmm(scores.softmax(-1), v_).view(slots, heads, dim)
