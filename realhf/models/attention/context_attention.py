"""Causal attention from parts of rows to whole rows: context parallelism."""

from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from realhf.ops import varlen
from realhf.ops.attention import BLOCK, ScoreParams, block_attention
from realhf.ops.rows import on_device


class RowPart(NamedTuple):
    """Queries ``start`` to ``stop`` are of a row whose keys begin at ``row``; the first has ``before`` earlier keys."""

    start: int
    stop: int
    row: int
    before: int

    @property
    def keys(self) -> slice:
        """The keys up to that of the last query."""
        return slice(self.row, self.row + self.before + self.stop - self.start)


def attend_to_rows(
    q: Tensor, k: Tensor, v: Tensor, parts: Sequence[RowPart], scoring: ScoreParams, sinks: Tensor | None = None
) -> Tensor:
    """Attend from queries ``[t, H, d]``, which ``parts`` cover in order, to k, v ``[T, K, d]``; return ``[t, H, d]``.

    Queries and keys are rotated. No scores are saved for the backward pass.
    """
    kernel = varlen.kernel_for(q.device, q.dtype, q.shape[-1], [scoring.rule])
    if kernel is not None and sinks is None and parts:
        return _by_kernel(kernel, q, k, v, parts, scoring)
    is_plain = not scoring.softcap and not scoring.window and sinks is None and q.device.type == "cpu"
    outs = []
    for part in parts:
        queries, keys, values = q[part.start : part.stop], k[part.keys], v[part.keys]
        if is_plain:
            outs.append(_PartAttention.apply(queries, keys, values, scoring.scale_for(q.shape[-1])))
        else:
            outs += _by_blocks(queries, keys, values, scoring, sinks)
    return torch.cat(outs) if outs else q + 0 * (k.sum() + v.sum())


def _by_kernel(
    kernel: varlen.VarlenKernel, q: Tensor, k: Tensor, v: Tensor, parts: Sequence[RowPart], scoring: ScoreParams
) -> Tensor:
    """The kernels align the last query with the last key."""
    sizes = [part.stop - part.start for part in parts], [part.keys.stop - part.keys.start for part in parts]
    cu_q, cu_k = (
        on_device(torch.tensor([*accumulate(some, initial=0)], dtype=torch.int32), q.device) for some in sizes
    )
    keys, values = (torch.cat([x[part.keys] for part in parts]) for x in (k, v))
    layout = cu_q, cu_k, max(sizes[0]), max(sizes[1])
    return kernel(q, keys, values, layout, scoring.scale_for(q.shape[-1]), scoring.rule)


def _by_blocks(q: Tensor, k: Tensor, v: Tensor, scoring: ScoreParams, sinks: Tensor | None) -> list[Tensor]:
    """Attend block by block of queries, whose scores are computed again in the backward pass."""
    computed_again = partial(checkpoint, block_attention, use_reentrant=False, preserve_rng_state=False)
    attend = computed_again if torch.is_grad_enabled() else block_attention
    before, outs = len(k) - len(q), list[Tensor]()
    for start in range(0, len(q), BLOCK):
        stop = min(start + BLOCK, len(q))
        first = max(0, before + start - scoring.window + 1) if scoring.window else 0
        some = (q[start:stop], k[first : before + stop], v[first : before + stop])
        queries, keys, values = map(_heads, some)
        out = attend(queries, keys, values, scoring, before + start - first, sinks)
        outs.append(out[0].transpose(0, 1))
    return outs


KERNEL = "ops.aten._scaled_dot_product_flash_attention_for_cpu"
"""Behind torch's function, which does not return normalisers; torch 2.5 to 2.15 have it with the same arguments."""
_forward, _backward = (attrgetter(name)(torch) for name in (KERNEL, f"{KERNEL}_backward"))


class _PartAttention(torch.autograd.Function):
    """Attention on CPUs from the last queries of a row, ``[n, H, d]``, to its keys and values, ``[m, K, d]``.

    It is that to the earlier keys, which all queries see, and the causal one to their own keys, merged by normalisers.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        own, normalisers = _forward(_heads(q), *_own_keys(q, k, v), 0.0, True, scale=scale)
        if len(k) > len(q):
            past, of_past = _forward(_grouped(q, k), *_past_keys(q, k, v), 0.0, False, scale=scale)
            past, of_past = past.reshape(own.shape), of_past.reshape(normalisers.shape)
            total = torch.logaddexp(normalisers, of_past)
            weights = ((x - total).exp().unsqueeze(-1).to(own.dtype) for x in (normalisers, of_past))
            own, normalisers = own * next(weights) + past * next(weights), total
        ctx.save_for_backward(q, k, v, own, normalisers)
        ctx.scale = scale
        return own[0].transpose(0, 1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k, v, out, normalisers = ctx.saved_tensors
        grad, n_kv, n_past = _heads(grad).contiguous(), k.shape[1], len(k) - len(q)
        gq, *own = _backward(grad, _heads(q), *_own_keys(q, k, v), out, normalisers, 0.0, True, scale=ctx.scale)
        gk, gv = torch.zeros_like(k), torch.zeros_like(v)
        for total, part in zip((gk, gv), own, strict=True):
            total[n_past:] = part[0].unflatten(0, (n_kv, -1)).sum(1).transpose(0, 1)
        if n_past:
            folded = [x.reshape(1, n_kv, -1, *x.shape[3:]) for x in (grad, out, normalisers)]
            parts = folded[0], _grouped(q, k), *_past_keys(q, k, v), *folded[1:]
            of_past, *past = _backward(*parts, 0.0, False, scale=ctx.scale)
            gq = gq + of_past.reshape(gq.shape)
            for total, part in zip((gk, gv), past, strict=True):
                total[:n_past] = part[0].transpose(0, 1)
        return gq[0].transpose(0, 1), gk, gv, None


def _heads(x: Tensor) -> Tensor:
    return x.transpose(0, 1).unsqueeze(0)


def _own_keys(q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
    """Return the keys and values of the queries' own tokens, ``[1, H, n, d]``."""
    groups = q.shape[1] // k.shape[1]
    return [_heads(x[-len(q) :]).repeat_interleave(groups, 1) for x in (k, v)]


def _past_keys(q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
    return [_heads(x[: -len(q)]) for x in (k, v)]


def _grouped(q: Tensor, k: Tensor) -> Tensor:
    """Return the queries of every key/value head as one batch, ``[1, K, H / K * n, d]``."""
    return _heads(q).reshape(1, k.shape[1], -1, q.shape[-1])
