"""Log-probabilities of given tokens under a large vocabulary, without ever holding all logits."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from realhf.ops import extension

TILES = {"cpu": (512, 2048)}
"""Tokens and words whose logits are held at once: 4 MiB stay in a CPU's caches; elsewhere products should be large."""
LARGE_TILE = (4096, 4096)


@dataclass(frozen=True)
class VocabularyCut:
    """A vocabulary that several workers hold parts of: where mine starts, the sizes of all, how to reduce in place."""

    start: int
    widths: tuple[int, ...]
    all_sum: Callable[[Tensor], Tensor]
    all_max: Callable[[Tensor], Tensor]

    def mine(self, targets: Tensor, size: int) -> tuple[Tensor, Tensor]:
        """Return targets in my numbering, 0 where they are not mine, and whether they are."""
        return _held(targets - self.start, size)


UNCUT = VocabularyCut(0, (), lambda x: x, lambda x: x)


class _PackedLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        scale: float,
        softcap: float,
        tile: tuple[int, int],
        cut: VocabularyCut,
        add_to: Tensor | None,
    ) -> Tensor:
        targets = targets - cut.start
        largest, sums, picked = _stats(hidden, weight, targets, scale, softcap, tile)
        of_all = cut.all_max(largest.clone())
        sums, picked = cut.all_sum(torch.stack([sums * (largest - of_all).exp(), picked]))
        logps = (picked - of_all) - sums.log()
        ctx.save_for_backward(hidden, weight, targets, sums.log() + of_all, logps)
        ctx.scale, ctx.softcap, ctx.tile, ctx.add_to = scale, softcap, tile, add_to
        return logps

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None, None, None, None]:
        hidden, weight, targets, normalisers, logps = ctx.saved_tensors
        need_hidden, need_weight = ctx.needs_input_grad[:2]
        n_tokens, n_words = ctx.tile
        grad_hidden = torch.zeros_like(hidden) if need_hidden else None
        total = ctx.add_to
        if total is None and need_weight:
            total = torch.zeros(weight.shape, device=weight.device)
        used = grad.nonzero()[:, 0]  # prompts carry no loss: their logits are not computed again
        buffer = _buffer(weight, used.numel(), ctx.tile)
        for rows in used.split(n_tokens):
            x, slope = hidden[rows], grad[rows].float()
            of_x = torch.zeros(x.shape, device=x.device) if need_hidden else None
            for start in range(0, weight.shape[0], n_words):
                words = weight[start : start + n_words]
                logits = _capped_(_product(x, words, buffer), ctx.softcap)
                steepness = 1 - (logits / ctx.softcap).square_() if ctx.softcap else None
                slopes = logit_slopes_(logits, targets[rows] - start, normalisers[rows], logps[rows], slope, ctx.scale)
                if steepness is not None:
                    slopes = slopes.mul_(steepness)
                if of_x is not None:
                    _add_product(of_x, slopes, words)
                if need_weight and total is not None:
                    _add_product(total[start : start + n_words], slopes.t(), x)
            if grad_hidden is not None and of_x is not None:
                grad_hidden[rows] = of_x.to(hidden.dtype)
        grad_weight = total.to(weight.dtype) if total is not None and ctx.add_to is None else None
        return grad_hidden, grad_weight, None, None, None, None, None, None


def _stats(
    hidden: Tensor, weight: Tensor, targets: Tensor, scale: float, softcap: float, tile: tuple[int, int]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return ``logit_stats`` of all tokens over all of ``weight``, tile by tile."""
    n_tokens, n_words = tile
    sums, picked = torch.zeros(2, targets.numel(), device=hidden.device)
    largest = torch.full_like(sums, -torch.inf)
    buffer = _buffer(weight, targets.numel(), tile)
    for rows in (slice(start, start + n_tokens) for start in range(0, targets.numel(), n_tokens)):
        for start in range(0, weight.shape[0], n_words):
            logits = _capped_(_product(hidden[rows], weight[start : start + n_words], buffer), softcap)
            largest_here, sums_here, picked_here = logit_stats(logits, targets[rows] - start, scale)
            of_both = torch.maximum(largest[rows], largest_here)
            sums[rows] *= (largest[rows] - of_both).exp()
            sums[rows] += sums_here * (largest_here - of_both).exp()
            largest[rows] = of_both
            picked[rows] += picked_here
    return largest, sums, picked


def logit_stats(logits: Tensor, targets: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return of ``x = scale * logits`` (``[n, V]``) per row: max(x), sum(exp(x - max(x))), x at target; float32.

    ``targets`` (``[n]`` int64) outside 0..V-1 pick 0: other workers hold them. The logits are used up.
    """
    kernel = extension.kernel("logit_stats", logits.device.type) if _kernel_fits(logits) else None
    return logit_stats_reference(logits, targets, scale) if kernel is None else kernel(logits, targets, scale)


def logit_stats_reference(logits: Tensor, targets: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Compute ``logit_stats`` in plain torch."""
    local, held = _held(targets, logits.shape[1])
    x = logits.float().mul_(scale)
    picked = x.gather(1, local[:, None])[:, 0].masked_fill(~held, 0.0)
    largest = x.amax(-1)
    return largest, x.sub_(largest[:, None]).exp_().sum(-1), picked


def logit_slopes_(
    logits: Tensor, targets: Tensor, normalisers: Tensor, logprobs: Tensor, grads: Tensor, scale: float
) -> Tensor:
    """Turn logits (``[n, V]``) into the gradient, in them, of ``grads . log softmax(x)[target]``; return them.

    ``x = scale * logits``, ``normalisers`` is log(sum(exp(x))) over the whole vocabulary, of which ``logits`` may be a
    part, and ``targets`` are as for ``logit_stats``. The gradient at a target is ``1 - p`` from its ``logprobs``: the
    logits, computed again in another chunk, differ in their last bits, all that is left of it where p is next to 1.
    ``normalisers``, ``logprobs`` and ``grads`` are ``[n]`` float32.
    """
    kernel = extension.kernel("logit_slopes_", logits.device.type) if _kernel_fits(logits) else None
    if kernel is None:
        return logit_slopes_reference_(logits, targets, normalisers, logprobs, grads, scale)
    kernel(logits, targets, normalisers, logprobs, grads, scale)
    return logits


def logit_slopes_reference_(
    logits: Tensor, targets: Tensor, normalisers: Tensor, logprobs: Tensor, grads: Tensor, scale: float
) -> Tensor:
    """Do what ``logit_slopes_`` does in plain torch."""
    local, held = _held(targets, logits.shape[1])
    ours = grads * scale
    slopes = logits.float().mul_(scale).sub_(normalisers[:, None]).exp_().mul_(-ours[:, None])
    at_target = torch.where(held, -ours * logprobs.expm1(), slopes.gather(1, local[:, None])[:, 0])
    slopes.scatter_(1, local[:, None], at_target[:, None])
    return slopes if slopes.dtype == logits.dtype else logits.copy_(slopes)


def _held(targets: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Return targets, 0 where they are outside 0..size-1, and whether they are inside."""
    held = (targets >= 0) & (targets < size)
    return targets.masked_fill(~held, 0), held


def _kernel_fits(logits: Tensor) -> bool:
    return logits.dtype in (torch.float32, torch.bfloat16) or (logits.is_cuda and logits.dtype == torch.float16)


def _buffer(weight: Tensor, count: int, tile: tuple[int, int]) -> Tensor:
    """Memory of a tile's logits: fresh memory per tile costs as much as the product."""
    return weight.new_empty(min(tile[0], count) * min(tile[1], weight.shape[0]))


def _product(hidden: Tensor, words: Tensor, buffer: Tensor) -> Tensor:
    shape = hidden.shape[0], words.shape[0]
    return torch.mm(hidden, words.t(), out=buffer[: shape[0] * shape[1]].view(shape))


def _capped_(logits: Tensor, softcap: float) -> Tensor:
    """Put logits through ``c * tanh(x / c)`` in place, where there is a cap c."""
    return logits.div_(softcap).tanh_().mul_(softcap) if softcap else logits


def _check_targets(targets: Tensor, vocab: int) -> None:
    wrong = (targets < 0) | (targets >= vocab)
    if bool(wrong.any()):
        raise ValueError(f"target {int(targets[wrong][0])} is not one of {vocab} tokens")


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
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
    cut: VocabularyCut = UNCUT,
    tile: tuple[int, int] | None = None,
    add_to: Tensor | None = None,
) -> Tensor:
    """Return ``log softmax(hidden @ weight.T / temperature)`` at ``targets``, ``[T]`` float32.

    With a ``softcap`` c the product goes through ``c * tanh(x / c)`` first (Gemma 2, arXiv 2408.00118, section 2).
    ``hidden`` is ``[T, D]``, ``weight`` ``[V, D]`` of the same type, ``targets`` ``[T]`` int64. Never more logits than
    those of a ``tile`` (tokens, words) exist at once; the backward pass computes them again, only for tokens whose
    gradient is not zero. With a cut, ``weight`` is my part of the vocabulary and the gradient of ``hidden`` is mine to
    be summed. The gradient of ``weight`` is added to ``add_to``, ``[V, D]`` float32, where that is given, and autograd
    hears nothing of it: it then takes no memory of its own. Raises ValueError for a temperature that is not positive
    and, on CPUs, for targets that are no tokens.
    """
    if temperature <= 0:
        raise ValueError(f"temperature must be positive, got {temperature}")
    if not targets.is_cuda:  # elsewhere the check would wait for the device
        _check_targets(targets, sum(cut.widths) or weight.shape[0])
    tile = tile or TILES.get(hidden.device.type, LARGE_TILE)
    return _PackedLogprobs.apply(hidden, weight, targets, 1.0 / temperature, softcap, tile, cut, add_to)
