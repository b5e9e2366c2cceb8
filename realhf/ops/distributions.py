"""Entropies, log-probabilities of several candidates, and largest probabilities of a large vocabulary.

Like ``packed_logprobs`` without storing all logits: a chunk of tokens has its logits at a time, and the backward pass
recomputes them. ``x`` are the logits divided by the temperature.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from realhf.ops.logprobs import FULL_VOCAB, VocabShard, add_product, capped_

CHUNK = {"cpu": 2**21}
"""Logits of a chunk: 8 MiB in float32; GPUs need large products."""
LARGE_CHUNK = 2**26


class _PackedDistribution(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        ids: Tensor,
        options: tuple[float, float],
        shard: VocabShard,
        add_to: Tensor | None,
    ) -> Tensor:
        local, held = shard.to_local(ids, weight.shape[0])
        largest = torch.empty(len(ids), device=hidden.device)
        sums = torch.zeros(len(ids), 2 + ids.shape[1], device=hidden.device)
        for rows, x, _ in _chunks(hidden, weight, torch.arange(len(ids), device=hidden.device), options):
            largest[rows] = x.amax(-1)
            sums[rows, 2:] = x.gather(1, local[rows]).masked_fill(~held[rows], 0.0)
            centred = x.sub_(largest[rows, None])
            probs = centred.exp()
            sums[rows, 0] = probs.sum(-1)
            sums[rows, 1] = probs.mul_(centred).sum(-1)
        global_max = shard.all_max(largest.clone())
        factor, distance = (largest - global_max).exp(), largest - global_max
        sums[:, 1] = (sums[:, 1] + sums[:, 0] * distance) * factor
        sums[:, 0] *= factor
        sums = shard.all_sum(sums)
        log_sum = sums[:, 0].log()
        normalisers, entropy = log_sum + global_max, log_sum - sums[:, 1] / sums[:, 0]
        ctx.save_for_backward(hidden, weight, local, held, normalisers, entropy)
        ctx.options, ctx.add_to = options, add_to
        return torch.cat((sums[:, 2:] - normalisers[:, None], entropy[:, None]), 1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, local, held, normalisers, entropy = ctx.saved_tensors
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        total = ctx.add_to
        if total is None and needs_weight:
            total = torch.zeros(weight.shape, device=weight.device)
        grad_hidden = torch.zeros_like(hidden) if needs_hidden else None
        used = grad.any(1).nonzero()[:, 0]
        for rows, x, cap_slope in _chunks(hidden, weight, used, ctx.options):
            of_ids, of_entropy = grad[rows, :-1], grad[rows, -1:]
            log_p = x.sub_(normalisers[rows, None])
            p = log_p.exp()
            slopes = -p * (of_ids.sum(1, keepdim=True) + of_entropy * (log_p + entropy[rows, None]))
            slopes.scatter_add_(1, local[rows], of_ids.masked_fill(~held[rows], 0.0))
            slopes *= ctx.options[0] if cap_slope is None else ctx.options[0] * cap_slope
            slopes = slopes.to(hidden.dtype)
            if grad_hidden is not None:
                grad_hidden[rows] = slopes @ weight
            if needs_weight and total is not None:
                add_product(total, slopes.t(), hidden[rows])
        grad_weight = total.to(weight.dtype) if total is not None and ctx.add_to is None else None
        return grad_hidden, grad_weight, None, None, None, None


def _chunks(
    hidden: Tensor, weight: Tensor, used: Tensor, options: tuple[float, float]
) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
    """Yield the tokens of a chunk, their logits ``x``, ``[n, V]`` float32, and the slope of the softcap, if any."""
    scale, softcap = options
    n = max(1, CHUNK.get(hidden.device.type, LARGE_CHUNK) // weight.shape[0])
    for rows in used.split(n):
        logits = capped_(torch.mm(hidden[rows], weight.t()).float(), softcap)
        slope = 1 - (logits / softcap).square_() if softcap else None
        yield rows, logits.mul_(scale), slope


def packed_distribution(
    hidden: Tensor,
    weight: Tensor,
    ids: Tensor,
    temperature: float = 1.0,
    softcap: float = 0.0,
    shard: VocabShard = FULL_VOCAB,
    add_to: Tensor | None = None,
) -> Tensor:
    """Return log-probabilities at ``ids``, ``[T, k]`` int64, and in the last column entropies in nats: ``[T, k + 1]``.

    Arguments and gradients are those of ``packed_logprobs``. The columns of ``ids`` may be none. IDs outside the
    vocabulary are not checked.
    """
    return _PackedDistribution.apply(hidden, weight, ids, (1.0 / temperature, softcap), shard, add_to)


@torch.no_grad()
def packed_top_logprobs(
    hidden: Tensor,
    weight: Tensor,
    k: int,
    temperature: float = 1.0,
    softcap: float = 0.0,
    shard: VocabShard = FULL_VOCAB,
    vocab: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the ``k`` most probable tokens, ``[T, k]`` int64, and their log-probabilities, float32, in falling order.

    Tokens from ``vocab`` on are left out of the choice, but not of the probabilities. ValueError for too few tokens.
    """
    n_tokens, n_shards, index = len(hidden), max(1, len(shard.widths)), _shard_index(shard)
    size = sum(shard.widths) or weight.shape[0]
    if k > min(size, vocab or size):
        raise ValueError(f"the {k} most probable of {min(size, vocab or size)} tokens do not exist")
    largest = torch.empty(n_tokens, device=hidden.device)
    sums = torch.empty_like(largest)
    values = torch.full((n_shards, n_tokens, k), -torch.inf, device=hidden.device)
    found = torch.zeros((n_shards, n_tokens, k), dtype=torch.int64, device=hidden.device)
    kept = min(k, weight.shape[0])
    for rows, x, _ in _chunks(
        hidden, weight, torch.arange(n_tokens, device=hidden.device), (1.0 / temperature, softcap)
    ):
        largest[rows] = x.amax(-1)
        sums[rows] = (x - largest[rows, None]).exp_().sum(-1)
        if vocab is not None and shard.start + x.shape[1] > vocab:
            x[:, max(0, vocab - shard.start) :] = -torch.inf
        top, at = x.topk(kept)
        values[index, rows, :kept], found[index, rows, :kept] = top, at + shard.start
    global_max = shard.all_max(largest.clone())
    normalisers = shard.all_sum(sums * (largest - global_max).exp()).log() + global_max
    if n_shards > 1:
        mine = torch.arange(n_shards, device=hidden.device)[:, None, None] == index
        values = shard.all_sum(values.masked_fill(~mine, 0.0))
        found = shard.all_sum(found.masked_fill(~mine, 0).double()).long()
    top, at = values.transpose(0, 1).reshape(n_tokens, n_shards * k).topk(k)
    return found.transpose(0, 1).reshape(n_tokens, n_shards * k).gather(1, at), top - normalisers[:, None]


def _shard_index(shard: VocabShard) -> int:
    starts = [sum(shard.widths[:i]) for i in range(len(shard.widths))]
    return starts.index(shard.start) if starts else 0
