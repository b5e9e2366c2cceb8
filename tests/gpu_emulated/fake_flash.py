"""The functions of FlashAttention 2 and 3 with their parameters, computed on fake devices."""

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from realhf.ops import varlen

CALLS: Counter[str] = Counter()


def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False, block_table: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """FlashAttention 2."""
    CALLS["flash_attn"] += 1
    options = {"softmax_scale": softmax_scale, "causal": causal, "window_size": window_size, "softcap": softcap}
    return _packed(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, **options)


def flash_attn_with_kvcache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor | None = None, v: Tensor | None = None,
    rotary_cos: Tensor | None = None, rotary_sin: Tensor | None = None, cache_seqlens: Tensor | None = None,
    cache_batch_idx: Tensor | None = None, cache_leftpad: Tensor | None = None, block_table: Tensor | None = None,
    softmax_scale: float | None = None, causal: bool = False, window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0, rotary_interleaved: bool = True, alibi_slopes: Tensor | None = None, num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """FlashAttention 2 and 3: q ``[B, m, H, d]``, caches ``[slots, max_len, K, d]``. Its operations do not wait."""
    CALLS["with_kvcache"] += 1
    assert cache_seqlens is not None and cache_seqlens.dtype == torch.int32
    assert cache_batch_idx is None or cache_batch_idx.dtype == torch.int32
    assert cache_leftpad is None or cache_leftpad.dtype == torch.int32
    assert q.shape[1] == 1 or not causal, "not emulated"
    if cache_batch_idx is not None:
        k_cache, v_cache = (x.index_select(0, cache_batch_idx) for x in (k_cache, v_cache))
    assert len(k_cache) == len(q)
    groups = q.shape[2] // k_cache.shape[2]
    keys, values = (x.float().repeat_interleave(groups, 2) for x in (k_cache, v_cache))
    positions, used = torch.arange(keys.shape[1], device=q.device), cache_seqlens[:, None]
    hidden = positions >= used
    if cache_leftpad is not None:
        hidden = hidden | (positions < cache_leftpad[:, None])
    if window_size[0] >= 0:
        hidden = hidden | (positions < used - 1 - window_size[0])
    scores = torch.einsum("bmhd,bkhd->bhmk", q.float(), keys) * (softmax_scale or q.shape[-1] ** -0.5)
    scores = _capped(scores, softcap).masked_fill(hidden[:, None, None], float("-inf"))
    values = values.masked_fill(hidden[..., None, None], 0.0)  # unused memory may be NaN
    out = torch.einsum("bhmk,bkhd->bmhd", scores.softmax(-1).nan_to_num(0.0), values).to(q.dtype)
    return (out, scores.logsumexp(-1)) if return_softmax_lse else out


def flash_attn_3_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    seqused_q: Tensor | None = None, seqused_k: Tensor | None = None, softmax_scale: float | None = None,
    causal: bool = False, qv: Tensor | None = None, q_descale: Tensor | None = None, k_descale: Tensor | None = None,
    v_descale: Tensor | None = None, window_size: tuple[int, int] = (-1, -1), attention_chunk: int = 0,
    softcap: float = 0.0, num_splits: int = 1, pack_gqa: bool | None = None, deterministic: bool = False,
    sm_margin: int = 0,
) -> tuple[Tensor, None]:  # fmt: skip
    """FlashAttention 3; early versions return the normalisers, too."""
    CALLS["flash_attn_interface"] += 1
    options = {"softmax_scale": softmax_scale, "causal": causal, "window_size": window_size, "softcap": softcap}
    return _packed(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, **options), None


def _packed(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int, *, softmax_scale: float | None,
    causal: bool, window_size: tuple[int, int], softcap: float,
) -> Tensor:  # fmt: skip
    assert causal and window_size[1] == 0
    if not softcap:
        return varlen_attn(q, k, v, cu_q, cu_k, max_q, max_k, scale=softmax_scale, window_size=window_size,
                           enable_gqa=True)  # fmt: skip
    outs, groups = [], q.shape[1] // k.shape[1]
    offsets = [x.tolist() for x in (cu_q, cu_k)]
    for start, stop, first, last in zip(*(x[i:][: len(x) - 1] for x in offsets for i in (0, 1)), strict=True):
        some_k, some_v = (x[first:last].float().repeat_interleave(groups, 1) for x in (k, v))
        distance = torch.arange(stop - start, device=q.device)[:, None] + (last - first) - (stop - start)
        distance = distance - torch.arange(last - first, device=q.device)
        hidden = distance < 0
        if window_size[0] >= 0:
            hidden = hidden | (distance > window_size[0])
        scores = torch.einsum("qhd,khd->hqk", q[start:stop].float(), some_k) * (softmax_scale or q.shape[-1] ** -0.5)
        probs = _capped(scores, softcap).masked_fill(hidden, float("-inf")).softmax(-1)
        outs.append(torch.einsum("hqk,khd->qhd", probs, some_v).to(q.dtype))
    return torch.cat(outs)


def _capped(scores: Tensor, softcap: float) -> Tensor:
    return torch.tanh(scores / softcap) * softcap if softcap else scores


@contextmanager
def installed(*names: str) -> Iterator[Counter[str]]:
    """Make ``flash_attn`` or ``flash_attn_interface`` importable; return the numbers of calls by module."""
    functions: dict[str, dict[str, Any]] = {
        "flash_attn": {"flash_attn_varlen_func": flash_attn_varlen_func},
        "flash_attn_interface": {"flash_attn_varlen_func": flash_attn_3_varlen_func},
    }
    with pytest.MonkeyPatch.context() as patch:
        for name in names:
            module = ModuleType(name)
            vars(module).update(functions[name], flash_attn_with_kvcache=flash_attn_with_kvcache)
            patch.setitem(sys.modules, name, module)
        varlen._load.cache_clear()
        CALLS.clear()
        try:
            yield CALLS
        finally:
            varlen._load.cache_clear()
