"""Log-probabilities of given tokens under a large vocabulary, without ever holding all logits."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

CHUNK_ELEMENTS = {"cpu": 1 << 23}
"""Logits held at once: 32 MiB stays near a CPU's caches; elsewhere products should be large."""


@dataclass(frozen=True)
class VocabularyCut:
    """A vocabulary that several workers hold parts of: where mine starts, how to reduce over all of them in place.

    ``widths`` are the sizes of all parts: chunks of tokens must be the same everywhere.
    """

    start: int
    widths: tuple[int, ...]
    all_sum: Callable[[Tensor], Tensor]
    all_max: Callable[[Tensor], Tensor]

    def mine(self, targets: Tensor, size: int) -> tuple[Tensor, Tensor]:
        """Return targets in my numbering, 0 where they are not mine, and whether they are."""
        local = targets - self.start
        held = (local >= 0) & (local < size)
        return local.masked_fill(~held, 0), held


UNCUT = VocabularyCut(0, (), lambda x: x, lambda x: x)


class _PackedLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, scale: float, chunk: int, cut: VocabularyCut
    ) -> Tensor:
        targets, held = cut.mine(targets, weight.shape[0])
        count = targets.numel()
        logps = torch.empty(count, device=hidden.device)
        normalisers = torch.empty(count, device=hidden.device)
        buffer = torch.empty(min(chunk, count), weight.shape[0], device=hidden.device)
        for start in range(0, count, chunk):
            part = slice(start, start + chunk)
            logits = _logits(hidden[part], weight, scale, buffer)
            picked = cut.all_sum(logits.gather(1, targets[part, None]).mul_(held[part, None]))
            largest = cut.all_max(logits.amax(-1, keepdim=True))
            log_sum = cut.all_sum(logits.sub_(largest).exp_().sum(-1, keepdim=True)).log_().add_(largest)
            normalisers[part] = log_sum[:, 0]
            logps[part] = (picked - log_sum)[:, 0]
        ctx.save_for_backward(hidden, weight, targets, held, normalisers)
        ctx.scale, ctx.chunk = scale, chunk
        return logps

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None, None]:
        hidden, weight, targets, held, normalisers = ctx.saved_tensors
        need_hidden, need_weight = ctx.needs_input_grad[:2]
        grad_hidden = torch.zeros_like(hidden) if need_hidden else None
        grad_weight = torch.zeros(weight.shape, device=weight.device) if need_weight else None
        used = grad.nonzero()[:, 0]  # prompts carry no loss: their logits are not computed again
        buffer = torch.empty(min(ctx.chunk, used.numel()), weight.shape[0], device=hidden.device)
        for rows in used.split(ctx.chunk):
            x = hidden[rows]
            slope = _logits(x, weight, ctx.scale, buffer).sub_(normalisers[rows, None]).exp_()
            ours = (grad[rows] * ctx.scale).unsqueeze(1)
            slope.mul_(-ours).scatter_add_(1, targets[rows, None], ours * held[rows, None])
            slope = slope.to(weight.dtype)
            if grad_hidden is not None:
                grad_hidden[rows] = slope @ weight
            if grad_weight is not None:
                _add_product(grad_weight, slope.t(), x)
        return grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype), None, None, None, None


def _logits(hidden: Tensor, weight: Tensor, scale: float, buffer: Tensor) -> Tensor:
    """Scaled float32 logits of a chunk, in ``buffer``: fresh memory per chunk costs as much as the product."""
    logits = buffer[: hidden.shape[0]]
    if weight.dtype == torch.float32:
        torch.mm(hidden, weight.t(), out=logits)
    else:
        logits.copy_(hidden @ weight.t())
    return logits if scale == 1.0 else logits.mul_(scale)


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
    chunk: int | None = None,
    cut: VocabularyCut = UNCUT,
) -> Tensor:
    """Return ``log softmax(hidden @ weight.T / temperature)`` at ``targets``, ``[T]`` float32.

    ``hidden`` is ``[T, D]``, ``weight`` ``[V, D]`` of the same type, ``targets`` ``[T]`` int64. Never more than
    ``chunk`` tokens' logits exist at once; the backward pass computes them again, only for tokens whose gradient is
    not zero. With a cut, ``weight`` is my part of the vocabulary and the gradient of ``hidden`` is mine to be summed.
    Raises ValueError for a temperature that is not positive.
    """
    if temperature <= 0:
        raise ValueError(f"temperature must be positive, got {temperature}")
    if chunk is None:
        chunk = max(1, CHUNK_ELEMENTS.get(hidden.device.type, 1 << 27) // max((weight.shape[0], *cut.widths)))
    return _PackedLogprobs.apply(hidden, weight, targets, 1.0 / temperature, chunk, cut)
