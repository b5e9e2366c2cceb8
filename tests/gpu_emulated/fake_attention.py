"""Torch's variable-length attention, computed row by row behind the checks of flash attention."""

import torch
from torch import Tensor

MAX_HEAD_DIM = 256


def _check(q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor) -> None:
    if q.dtype not in (torch.float16, torch.bfloat16) or not q.dtype == k.dtype == v.dtype:
        raise RuntimeError(f"FlashAttention only supports fp16 and bf16, got {q.dtype}, {k.dtype}, {v.dtype}")
    if cu_q.dtype != torch.int32 or cu_k.dtype != torch.int32:
        raise RuntimeError("cu_seqlens must have dtype int32")
    if not cu_q.is_contiguous() or not cu_k.is_contiguous():
        raise RuntimeError("cu_seqlens must be contiguous")
    if any(x.stride(-1) != 1 for x in (q, k, v)):
        raise RuntimeError("Input tensor must have contiguous last dimension")
    if q.shape[-1] % 8 or q.shape[-1] > MAX_HEAD_DIM:
        raise RuntimeError(f"head_size should be a multiple of 8, and at most {MAX_HEAD_DIM}, got {q.shape[-1]}")
    if q.shape[1] % k.shape[1]:
        raise RuntimeError(f"{q.shape[1]} query heads for {k.shape[1]} key heads")


def _spans(cu: Tensor, longest: int, used: Tensor | None = None) -> list[slice]:
    starts, stops = cu[:-1].tolist(), cu[1:].tolist()
    if used is not None:
        assert used.dtype == torch.int32
        stops = [start + n for start, n in zip(starts, used.tolist(), strict=True)]
    assert all(stop - start <= longest for start, stop in zip(starts, stops, strict=True)), "a row exceeds its bound"
    return [slice(start, stop) for start, stop in zip(starts, stops, strict=True)]


def _probs(q: Tensor, k: Tensor, causal: bool, scale: float, window: list[int]) -> tuple[Tensor, Tensor]:
    """Return probabilities ``[H, Q, K]`` and their normalisers; the last query is at the last key."""
    distance = torch.arange(len(q))[:, None] + len(k) - len(q) - torch.arange(len(k))
    right = 0 if causal else window[1]
    hidden = torch.zeros_like(distance, dtype=torch.bool)
    if right >= 0:
        hidden |= distance < -right
    if window[0] >= 0:
        hidden |= distance > window[0]
    scores = (torch.einsum("qhd,khd->hqk", q, k) * scale).masked_fill(hidden, float("-inf"))
    return scores.softmax(-1).nan_to_num(0.0), scores.logsumexp(-1)


def varlen_forward(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int, causal: bool = False,
    scale: float | None = None, window: list[int] | None = None, gqa: bool = False, used: Tensor | None = None,
    block_table: Tensor | None = None, num_splits: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    _check(q, k, v, cu_q, cu_k)
    assert block_table is None, "pages are not emulated"
    groups, outs, normalisers = q.shape[1] // k.shape[1], [q.new_empty(0, *q.shape[1:])], []
    assert gqa or groups == 1
    for rows, keys in zip(_spans(cu_q, max_q), _spans(cu_k, max_k, used), strict=True):
        some_k, some_v = (x[keys].float().repeat_interleave(groups, 1) for x in (k, v))
        probs, sums = _probs(q[rows].float(), some_k, causal, scale or q.shape[-1] ** -0.5, window or [-1, -1])
        normalisers.append(sums)
        outs.append(torch.einsum("hqk,khd->qhd", probs, some_v).to(q.dtype))
    return torch.cat(outs), torch.cat(normalisers, 1), torch.zeros(2, dtype=torch.uint64)


def varlen_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, cu_q: Tensor, cu_k: Tensor,
    max_q: int, max_k: int, causal: bool, rng: Tensor, scale: float | None = None, window: list[int] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    groups, scale = q.shape[1] // k.shape[1], scale or q.shape[-1] ** -0.5
    grad_q, grad_k, grad_v = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for rows, keys in zip(_spans(cu_q, max_q), _spans(cu_k, max_k), strict=True):
        some_q, some_grad = q[rows].float(), grad[rows].float()
        some_k, some_v = (x[keys].float().repeat_interleave(groups, 1) for x in (k, v))
        probs, _ = _probs(some_q, some_k, causal, scale, window or [-1, -1])
        slopes = torch.einsum("qhd,khd->hqk", some_grad, some_v)
        slopes = probs * (slopes - (slopes * probs).sum(-1, keepdim=True)) * scale
        grad_q[rows] = torch.einsum("hqk,khd->qhd", slopes, some_k).to(q.dtype)
        grad_k[keys] = torch.einsum("hqk,qhd->khd", slopes, some_q).unflatten(1, (-1, groups)).sum(2).to(k.dtype)
        grad_v[keys] = torch.einsum("hqk,qhd->khd", probs, some_grad).unflatten(1, (-1, groups)).sum(2).to(v.dtype)
    return grad_q, grad_k, grad_v
