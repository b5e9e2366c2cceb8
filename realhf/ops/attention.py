"""Causal attention over packed rows, and of one token per slot over a KV cache. Grouped heads are never expanded."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from realhf.ops import extension, varlen
from realhf.ops.norms import rotate
from realhf.ops.rows import RowLayout

BLOCK = 256
"""Queries per block where the reference implementation stores scores."""


@dataclass(frozen=True)
class ScoreParams:
    """Scores are ``scale * q . k``, mapped to ``c * tanh(x / c)`` for a ``softcap`` c > 0.

    A query sees the last ``window`` keys including its own (0: all). A ``scale`` of 0 means ``head_dim ** -0.5``.
    """

    scale: float = 0.0
    window: int = 0
    softcap: float = 0.0

    def scale_for(self, head_dim: int) -> float:
        return self.scale or head_dim**-0.5

    @property
    def rule(self) -> varlen.Rule:
        return self.softcap, self.window

    def cap(self, scores: Tensor) -> Tensor:
        return torch.tanh(scores / self.softcap) * self.softcap if self.softcap else scores


DEFAULT_SCORES = ScoreParams()


def rotary_attention(
    qkv: Tensor,
    n_q: int,
    n_kv: int,
    lengths: Sequence[int],
    scoring: ScoreParams = DEFAULT_SCORES,
    prefixes: Sequence[int] = (),
    angles: Tensor | None = None,
    layout: RowLayout | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attend causally within each packed row; return ``[T, n_q, d]``.

    ``qkv`` is ``[T, n_q + 2 * n_kv, d]``: fused queries, keys and values, with n_q a multiple of n_kv. Row i with
    ``prefixes[i] = p >= 0`` continues row p, which has no prefix itself: it also sees all of p's keys, whose gradients
    are summed over the rows that share them. By default no row has a prefix. If ``angles`` (``Rotary.table``) are
    given, queries and keys are rotated by their positions first. The calls of a pass share a ``layout`` of these rows.
    ``sinks`` ``[n_q]`` are scores of one more key per head, whose value is zero (arXiv 2309.17453, section 3.3).
    ValueError for lengths or prefixes that do not fit.

    Uses the compiled kernel (CPU: float32, and bfloat16 computed in float32), a kernel of ``ops.varlen`` for 16-bit
    types on GPUs, or ``rotary_attention_reference``.
    """
    varlen_kernel = varlen.kernel_for(qkv.device, qkv.dtype, qkv.shape[-1], [scoring.rule])
    if qkv.numel() and varlen_kernel is not None and sinks is None:
        _check_rows(qkv, lengths, prefixes)
        layout = layout or RowLayout(tuple(lengths), tuple(prefixes), qkv.device)
        parts = _split_and_rotate(qkv, n_q, n_kv, layout, angles)
        return varlen.varlen_attention(varlen_kernel, *parts, layout, scoring.scale_for(qkv.shape[-1]), scoring.rule)
    fits = qkv.dtype in (torch.float32, torch.bfloat16) and qkv.numel() > 0
    if not fits or extension.kernel("packed_attention", qkv.device.type) is None:
        return rotary_attention_reference(qkv, n_q, n_kv, lengths, scoring, prefixes, angles, layout, sinks)
    table = torch.frombuffer(array("q", (*lengths, *(prefixes or (-1,) * len(lengths)))), dtype=torch.int64)
    try:
        rows = table.view(2, len(lengths))
        return _Attention.apply(qkv, n_q, n_kv, rows, angles, scoring, sinks)
    except RuntimeError:  # the kernel checks faster, this check has the better message
        _check_rows(qkv, lengths, prefixes)
        raise


class _Attention(torch.autograd.Function):
    """The kernels read views of one tensor and write its gradient as one."""

    @staticmethod
    def forward(
        ctx: Any, qkv: Tensor, n_q: int, n_kv: int, rows: Tensor, angles: Tensor | None, scoring: ScoreParams,
        sinks: Tensor | None,
    ) -> Tensor:  # fmt: skip
        kernel = extension.required("packed_attention", qkv.device.type)
        ctx.sizes = n_q, n_kv, n_kv
        ctx.scoring = scoring.scale_for(qkv.shape[-1]), scoring.window, scoring.softcap
        out, normalisers = kernel(*qkv.split(ctx.sizes, 1), rows, angles, *ctx.scoring)
        if sinks is not None:
            alone, normalisers = normalisers, torch.logaddexp(normalisers, sinks.float())
            out = out * (alone - normalisers).exp().unsqueeze(-1).to(out.dtype)
        ctx.save_for_backward(qkv, out, normalisers, rows, angles, sinks)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        qkv, out, normalisers, rows, angles, sinks = ctx.saved_tensors
        kernel = extension.required("packed_attention_backward", grad.device.type)
        parts = qkv.split(ctx.sizes, 1)
        sinks_grad = None
        if sinks is not None:  # a sink's probability p has the gradient p * (0 - sum(grad * out)), its value is zero
            along = (grad.float() * out.float()).sum(-1)
            sinks_grad = -((sinks.float() - normalisers).exp() * along).sum(0).to(sinks.dtype)
        return (kernel(grad, *parts, out, normalisers, rows, angles, *ctx.scoring), *[None] * 5, sinks_grad)


def supports_shared_prefixes(
    device: torch.device, dtype: torch.dtype, head_dim: int, softcap: float = 0.0, window: int = 0
) -> bool:
    """Return True if a kernel makes shared prefixes faster than repeating them in every row."""
    on_gpu = varlen.kernel_for(device, dtype, head_dim, [(softcap, window)]) is not None
    return on_gpu or extension.kernel("packed_attention", device.type) is not None


def _check_rows(q: Tensor, lengths: Sequence[int], prefixes: Sequence[int]) -> None:
    if sum(lengths) != len(q) or min(lengths, default=0) < 0:
        raise ValueError(f"lengths {tuple(lengths)} do not sum to the {len(q)} tokens")
    if prefixes and len(prefixes) != len(lengths):
        raise ValueError(f"{len(prefixes)} prefixes for {len(lengths)} rows")
    for row, prefix in enumerate(prefixes):
        if not -1 <= prefix < len(lengths) or (prefix >= 0 and prefixes[prefix] >= 0):
            raise ValueError(f"row {row} has prefix {prefix}, which is not a row without a prefix")


def rotary_attention_reference(
    qkv: Tensor,
    n_q: int,
    n_kv: int,
    lengths: Sequence[int],
    scoring: ScoreParams = DEFAULT_SCORES,
    prefixes: Sequence[int] = (),
    angles: Tensor | None = None,
    layout: RowLayout | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """The reference implementation of ``rotary_attention``.

    Adjacent rows of equal length form one dense batch without copies. Rows with prefixes are computed one by one.
    """
    _check_rows(qkv, lengths, prefixes)
    layout = layout or RowLayout(tuple(lengths), tuple(prefixes), qkv.device)
    q, k, v = _split_and_rotate(qkv, n_q, n_kv, layout, angles)
    if max(prefixes, default=-1) >= 0:
        parts = zip(*(x.split(list(lengths)) for x in (q, k, v)), strict=True)
        return torch.cat(_with_prefixes(list(parts), prefixes, scoring, sinks))
    runs = [(len(list(group)), length) for length, group in groupby(lengths) if length]
    if not runs:
        return q
    if len(runs) == 1:
        return _dense(q, k, v, *runs[0], scoring, sinks)
    sizes = [n * length for n, length in runs]
    # split: a single cat in the backward pass
    by_run = zip(q.split(sizes), k.split(sizes), v.split(sizes), runs, strict=True)
    return torch.cat([_dense(qs, ks, vs, *run, scoring, sinks) for qs, ks, vs, run in by_run])


def _split_and_rotate(
    qkv: Tensor, n_q: int, n_kv: int, layout: RowLayout, angles: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    qk, v = qkv.split((n_q + n_kv, n_kv), 1)
    if angles is not None:
        qk = rotate(qk, angles, layout.positions, partial(layout.rotation, angles, qkv.dtype))
    q, k = qk.split((n_q, n_kv), 1)
    return q, k, v


def _with_prefixes(
    rows: list[tuple[Tensor, Tensor, Tensor]], prefixes: Sequence[int], scoring: ScoreParams, sinks: Tensor | None
) -> list[Tensor]:
    outs = []
    for (q, k, v), prefix in zip(rows, prefixes, strict=True):
        if prefix >= 0:
            k, v = torch.cat((rows[prefix][1], k)), torch.cat((rows[prefix][2], v))
        q_, k_, v_ = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
        outs.append(block_attention(q_, k_, v_, scoring, len(k) - len(q), sinks)[0].transpose(0, 1) if len(q) else q)
    return outs


def _dense(q: Tensor, k: Tensor, v: Tensor, n: int, length: int, scoring: ScoreParams, sinks: Tensor | None) -> Tensor:
    """Attend within ``n`` rows of one length, viewed as ``[n, heads, length, d]``."""
    q_, k_, v_ = (x.unflatten(0, (n, length)).transpose(1, 2) for x in (q, k, v))
    if scoring.softcap or sinks is not None or 0 < scoring.window < length:
        out = _by_blocks(q_, k_, v_, scoring, sinks)
    else:
        scale, grouped = scoring.scale_for(q.shape[-1]), q.shape[1] != k.shape[1]
        out = F.scaled_dot_product_attention(q_, k_, v_, is_causal=True, scale=scale, enable_gqa=grouped)
    return out.transpose(1, 2).reshape(q.shape)


def _by_blocks(q: Tensor, k: Tensor, v: Tensor, scoring: ScoreParams, sinks: Tensor | None) -> Tensor:
    length = q.shape[2]
    step = max(BLOCK, scoring.window)
    stores_scores = scoring.softcap or sinks is not None
    recompute = stores_scores and torch.is_grad_enabled()  # saves no scores for the backward pass
    computed_again = partial(checkpoint, block_attention, use_reentrant=False, preserve_rng_state=False)
    attend = computed_again if recompute else block_attention
    outs = []
    for start in range(0, length, step):
        stop = min(start + step, length)
        first = max(0, start - scoring.window + 1) if scoring.window else 0
        parts = q[:, :, start:stop], k[:, :, first:stop], v[:, :, first:stop]
        outs.append(attend(*parts, scoring, start - first, sinks))
    return torch.cat(outs, 2)


def block_attention(
    q: Tensor, k: Tensor, v: Tensor, scoring: ScoreParams, offset: int, sinks: Tensor | None = None
) -> Tensor:
    """Attend from ``[n, H, Q, d]`` to keys ``[n, K, S, d]``; the first query's own key is at ``offset``."""
    distance = torch.arange(q.shape[2], device=q.device)[:, None] + offset - torch.arange(k.shape[2], device=q.device)
    visible = (distance >= 0) & (distance < scoring.window) if scoring.window else distance >= 0
    scale = scoring.scale_for(q.shape[-1])
    if not scoring.softcap and sinks is None:
        grouped = q.shape[1] != k.shape[1]
        return F.scaled_dot_product_attention(q, k, v, visible, scale=scale, enable_gqa=grouped)
    groups = q.shape[1] // k.shape[1]
    rows = q.unflatten(1, (-1, groups)).flatten(2, 3)  # [n, K, groups * Q, d]
    scores = scoring.cap(rows @ k.transpose(2, 3) * scale).unflatten(2, (groups, -1))
    acc_dtype = torch.promote_types(q.dtype, torch.float32)
    scores = scores.masked_fill(~visible, float("-inf"))
    probs = _with_sinks(scores, None if sinks is None else sinks.view(-1, groups, 1), acc_dtype).to(q.dtype)
    return (probs.flatten(2, 3) @ v).unflatten(2, (groups, -1)).flatten(1, 2)


def _with_sinks(scores: Tensor, sinks: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return the softmax of ``scores`` ``[..., S]`` and of one more score ``sinks`` ``[...]``, without the latter.

    The result has this type. With sinks it is computed in it.
    """
    if sinks is None:
        return scores.softmax(-1, dtype=dtype)
    scores = scores.to(dtype)
    return scores.softmax(-1) * (scores.logsumexp(-1) - sinks).sigmoid().unsqueeze(-1)


def attend_to_prefix(
    q: Tensor, k: Tensor, v: Tensor, scoring: ScoreParams = DEFAULT_SCORES, sinks: Tensor | None = None
) -> Tensor:
    """Attend from the last tokens of a row, ``[T, H, d]``, to keys and values of the row, ``[K, S, d]``."""
    parts = q.transpose(0, 1).unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0)
    out = block_attention(*parts, scoring, k.shape[1] - len(q), sinks)
    return out[0].transpose(0, 1)


def decode_bias(positions: Tensor, longest: int, n_kv_heads: int, window: int = 0) -> Tensor:
    """Return ``[S*K, 1, longest]`` float32: 0 for visible cache positions, minus infinity for others."""
    distance = positions[:, None] - torch.arange(longest, device=positions.device)
    hidden = (distance < 0) | (distance >= window) if window else distance < 0
    bias = torch.zeros(hidden.shape, device=positions.device).masked_fill_(hidden, float("-inf"))
    return bias.repeat_interleave(n_kv_heads, 0).unsqueeze(1)


def decode_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor,
    scoring: ScoreParams = DEFAULT_SCORES,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attend from one token per slot to the cache up to its position; return ``[S, H, d]``.

    ``q`` is ``[S, H, d]``; ``k`` and ``v`` are a contiguous cache ``[S, K, Lmax, d]``. ``bias`` is ``decode_bias`` for
    the window in q's dtype, which the layers of a step share.
    """
    slots, heads, dim = q.shape
    n_kv, longest = k.shape[1], bias.shape[-1]
    k_, v_ = (x[:, :, :longest].view(slots * n_kv, longest, dim) for x in (k, v))
    grouped, scale = q.reshape(slots * n_kv, heads // n_kv, dim), scoring.scale_for(dim)
    if scoring.softcap:
        scores = scoring.cap(torch.bmm(grouped, k_.transpose(1, 2)) * scale) + bias
    else:
        scores = torch.baddbmm(bias, grouped, k_.transpose(1, 2), alpha=scale)
    per_group = None if sinks is None else sinks.view(n_kv, -1).repeat(slots, 1)
    dtype = q.dtype if sinks is None else torch.promote_types(q.dtype, torch.float32)
    return torch.bmm(_with_sinks(scores, per_group, dtype).to(q.dtype), v_).view(slots, heads, dim)
