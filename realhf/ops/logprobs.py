"""Log-probabilities of given tokens under a large vocabulary, without storing all logits."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from realhf.ops import extension

TILES = {"cpu": (512, 2048)}
"""Tokens and vocabulary entries per tile of logits: 4 MiB fit a CPU's caches; GPUs need large products."""
LARGE_TILE = (4096, 4096)
KEPT_LOGITS = {"cpu": 4 << 20}
"""The number of logits that the forward pass keeps, by device; the backward pass computes the others again."""
Options = tuple[float, float, tuple[int, int]]
"""Scale, softcap and tile of ``packed_logprobs``."""


@dataclass(frozen=True)
class VocabShard:
    """This worker's shard of the vocabulary: its start, the sizes of all shards, and in-place reductions over them."""

    start: int
    widths: tuple[int, ...]
    all_sum: Callable[[Tensor], Tensor]
    all_max: Callable[[Tensor], Tensor]

    def to_local(self, targets: Tensor, size: int) -> tuple[Tensor, Tensor]:
        """Return indices into this shard of ``size`` entries, 0 for tokens of other shards, and the mask of its own."""
        return _localise(targets - self.start, size)


FULL_VOCAB = VocabShard(0, (), lambda x: x, lambda x: x)


class _PackedLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        options: Options,
        shard: VocabShard,
        add_to: Tensor | None,
    ) -> Tensor:
        targets = targets - shard.start
        kept = _for_logits(hidden, weight) if any(ctx.needs_input_grad[:2]) else hidden.new_empty(0, len(weight))
        largest, sums, picked = _stats(hidden, weight, targets, *options, kept)
        global_max = shard.all_max(largest.clone())
        sums, picked = shard.all_sum(torch.stack([sums * (largest - global_max).exp(), picked]))
        logps = (picked - global_max) - sums.log()
        ctx.save_for_backward(hidden, weight, targets, sums.log() + global_max, logps, kept)
        ctx.options, ctx.add_to = options, add_to
        return logps

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, normalisers, logps, kept = ctx.saved_tensors
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        scale, softcap, (n_tokens, n_words) = ctx.options
        grad_hidden = torch.zeros_like(hidden) if needs_hidden else None
        total = ctx.add_to
        if total is None and needs_weight:
            total = torch.zeros(weight.shape, device=weight.device)
        used = grad.nonzero()[:, 0]  # tokens without a loss, such as prompts, are skipped
        buffer = _buffer(weight, used.numel(), (n_tokens, n_words))
        for rows, is_kept in _row_tiles(used, n_tokens, len(kept)):
            x, grad_rows = hidden[rows], grad[rows].float()
            x_grad = torch.zeros(x.shape, device=x.device) if needs_hidden else None
            for start in range(0, weight.shape[0], n_words):
                words = weight[start : start + n_words]
                if is_kept:
                    logits = _in_buffer(buffer, x, words).copy_(kept[rows, start : start + n_words])
                else:
                    logits = capped_(_product(x, words, buffer), softcap)
                cap_grad = 1 - (logits / softcap).square_() if softcap else None
                slopes = logit_slopes_(logits, targets[rows] - start, normalisers[rows], logps[rows], grad_rows, scale)
                if cap_grad is not None:
                    slopes = slopes.mul_(cap_grad)
                if x_grad is not None:
                    add_product(x_grad, slopes, words)
                if needs_weight and total is not None:
                    add_product(total[start : start + n_words], slopes.t(), x)
            if grad_hidden is not None and x_grad is not None:
                grad_hidden[rows] = x_grad.to(hidden.dtype)
        grad_weight = total.to(weight.dtype) if total is not None and ctx.add_to is None else None
        return grad_hidden, grad_weight, None, None, None, None


def _stats(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    scale: float,
    softcap: float,
    tile: tuple[int, int],
    kept: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return ``logit_stats`` over all words, and copy the logits of the first tokens to ``kept``."""
    n_tokens, n_words = tile
    sums, picked = torch.zeros(2, targets.numel(), device=hidden.device)
    largest = torch.full_like(sums, -torch.inf)
    buffer = _buffer(weight, targets.numel(), tile)
    for rows in (slice(start, start + n_tokens) for start in range(0, targets.numel(), n_tokens)):
        for start in range(0, weight.shape[0], n_words):
            logits = capped_(_product(hidden[rows], weight[start : start + n_words], buffer), softcap)
            if (of_kept := kept[rows, start : start + n_words]).numel():
                of_kept.copy_(logits[: len(of_kept)])
            tile_max, tile_sums, tile_picked = logit_stats(logits, targets[rows] - start, scale)
            new_max = torch.maximum(largest[rows], tile_max)
            sums[rows] *= (largest[rows] - new_max).exp()
            sums[rows] += tile_sums * (tile_max - new_max).exp()
            largest[rows] = new_max
            picked[rows] += tile_picked
    return largest, sums, picked


def logit_stats(logits: Tensor, targets: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return max(x), sum(exp(x - max(x))) and x at the target of ``x = scale * logits`` (``[n, V]``), ``[n]`` float32.

    ``targets`` (``[n]`` int64) outside 0..V-1 belong to other shards and give 0. ``logits`` may be overwritten.
    """
    kernel = extension.kernel("logit_stats", logits.device.type) if _kernel_fits(logits) else None
    return logit_stats_reference(logits, targets, scale) if kernel is None else kernel(logits, targets, scale)


def logit_stats_reference(logits: Tensor, targets: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    local, held = _localise(targets, logits.shape[1])
    x = logits.float().mul_(scale)
    picked = x.gather(1, local[:, None])[:, 0].masked_fill(~held, 0.0)
    largest = x.amax(-1)
    return largest, x.sub_(largest[:, None]).exp_().sum(-1), picked


def logit_slopes_(
    logits: Tensor, targets: Tensor, normalisers: Tensor, logprobs: Tensor, grads: Tensor, scale: float
) -> Tensor:
    """Replace logits (``[n, V]``) by the gradient of ``grads . log softmax(x)[target]`` in them; return them.

    ``x = scale * logits``; ``normalisers`` is log(sum(exp(x))) over the whole vocabulary, of which ``logits`` may be a
    tile; ``targets`` are as in ``logit_stats``. The gradient at a target uses ``1 - p`` from ``logprobs``, because
    recomputed logits may differ in their last bits, which dominate ``1 - p`` for p close to 1. ``normalisers``,
    ``logprobs`` and ``grads`` are ``[n]`` float32.
    """
    kernel = extension.kernel("logit_slopes_", logits.device.type) if _kernel_fits(logits) else None
    if kernel is None:
        return logit_slopes_reference_(logits, targets, normalisers, logprobs, grads, scale)
    kernel(logits, targets, normalisers, logprobs, grads, scale)
    return logits


def logit_slopes_reference_(
    logits: Tensor, targets: Tensor, normalisers: Tensor, logprobs: Tensor, grads: Tensor, scale: float
) -> Tensor:
    local, held = _localise(targets, logits.shape[1])
    scaled_grads = grads * scale
    slopes = logits.float().mul_(scale).sub_(normalisers[:, None]).exp_().mul_(-scaled_grads[:, None])
    at_target = torch.where(held, -scaled_grads * logprobs.expm1(), slopes.gather(1, local[:, None])[:, 0])
    slopes.scatter_(1, local[:, None], at_target[:, None])
    return slopes if slopes.dtype == logits.dtype else logits.copy_(slopes)


def _localise(targets: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Return targets, 0 if outside 0..size-1, and the mask of those inside."""
    held = (targets >= 0) & (targets < size)
    return targets.masked_fill(~held, 0), held


def _kernel_fits(logits: Tensor) -> bool:
    return logits.dtype in (torch.float32, torch.bfloat16) or (logits.is_cuda and logits.dtype == torch.float16)


def _buffer(weight: Tensor, count: int, tile: tuple[int, int]) -> Tensor:
    """Allocate the logits of a tile once: an allocation per tile costs as much as the product."""
    return weight.new_empty(min(tile[0], count) * min(tile[1], weight.shape[0]))


def _product(hidden: Tensor, words: Tensor, buffer: Tensor) -> Tensor:
    return torch.mm(hidden, words.t(), out=_in_buffer(buffer, hidden, words))


def _in_buffer(buffer: Tensor, hidden: Tensor, words: Tensor) -> Tensor:
    shape = hidden.shape[0], words.shape[0]
    return buffer[: shape[0] * shape[1]].view(shape)


def _for_logits(hidden: Tensor, weight: Tensor) -> Tensor:
    """Return a tensor for the logits of the first tokens, ``[n, V]``, within the limit of this device."""
    most = KEPT_LOGITS.get(hidden.device.type, 0) // len(weight)
    return hidden.new_empty(min(most, len(hidden)), len(weight))


def _row_tiles(used: Tensor, n_tokens: int, n_kept: int) -> list[tuple[Tensor, bool]]:
    """Return tiles of at most ``n_tokens`` of the ``used`` tokens, and whether they are among the first ``n_kept``."""
    if not n_kept:
        return [(rows, False) for rows in used.split(n_tokens)]
    first = used < n_kept
    return [(rows, is_kept) for is_kept, some in ((True, used[first]), (False, used[~first]))
            for rows in some.split(n_tokens) if len(rows)]  # fmt: skip


def capped_(logits: Tensor, softcap: float) -> Tensor:
    return logits.div_(softcap).tanh_().mul_(softcap) if softcap else logits


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    if a.dtype == torch.float32:
        total.addmm_(a, b)
    else:
        total.add_(a @ b)


def packed_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: float = 1.0,
    softcap: float = 0.0,
    shard: VocabShard = FULL_VOCAB,
    tile: tuple[int, int] | None = None,
    add_to: Tensor | None = None,
) -> Tensor:
    """Return ``log softmax(hidden @ weight.T / temperature)`` at ``targets``, ``[T]`` float32.

    ``hidden`` is ``[T, D]``, ``weight`` ``[V, D]`` of the same dtype, ``targets`` ``[T]`` int64. A ``softcap`` c maps
    products x to ``c * tanh(x / c)`` (Gemma 2, arXiv 2408.00118, section 2). Beside the first ``KEPT_LOGITS``, only one
    ``tile`` (tokens, entries) of logits exists at a time; the backward pass computes the others of tokens with a
    nonzero gradient again. With a vocabulary ``shard``, ``weight`` is this worker's and the gradient of ``hidden`` is a
    partial sum. If ``add_to``, ``[V, D]`` float32, is given, the gradient of ``weight`` is added to it instead of being
    returned to autograd. Raises ValueError for a temperature that is not positive and, on CPUs, for targets outside the
    vocabulary.
    """
    if temperature <= 0:
        raise ValueError(f"temperature must be positive, got {temperature}")
    vocab = sum(shard.widths) or weight.shape[0]
    # on CUDA the check would synchronise
    if not targets.is_cuda and bool((invalid := (targets < 0) | (targets >= vocab)).any()):
        raise ValueError(f"target {int(targets[invalid][0])} is outside the vocabulary of {vocab} tokens")
    tile = tile or TILES.get(hidden.device.type, LARGE_TILE)
    return _PackedLogprobs.apply(hidden, weight, targets, (1.0 / temperature, softcap, tile), shard, add_to)
