"""One step of AdamW on flat tensors (Loshchilov and Hutter, arXiv 1711.05101, algorithm 2)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from realhf.ops import extension


@dataclass(frozen=True)
class AdamWStep:
    """Step number ``steps`` (from 1). Gradients are multiplied by ``scale``; the first ``n_decayed`` elements decay."""

    steps: int
    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    n_decayed: int
    scale: float = 1.0


def adamw_(
    master: Tensor, grad: Tensor, first: Tensor, second: Tensor, step: AdamWStep, rounded: Tensor | None = None
) -> None:
    """Update ``master`` and its moments ``first`` and ``second`` in place by ``grad``, all ``[N]`` float32.

    ``rounded``, ``[N]`` bfloat16, receives the new ``master`` rounded to nearest: the weights of a bfloat16 model. The
    kernel makes one pass over memory; the result does not depend on the number of threads.
    """
    fits = rounded is None or rounded.dtype == torch.bfloat16
    kernel = extension.kernel("adamw_", master.device.type) if fits else None
    if kernel is None:
        return adamw_reference_(master, grad, first, second, step, rounded)
    kernel(
        master, grad, first, second, rounded, step.n_decayed, step.lr, step.beta1, step.beta2, step.eps,
        step.weight_decay, step.steps, step.scale,
    )  # fmt: skip
    for updated in (master, first, second, rounded):
        if updated is not None:
            torch.autograd.graph.increment_version(updated)


@torch.no_grad()
def adamw_reference_(
    master: Tensor, grad: Tensor, first: Tensor, second: Tensor, step: AdamWStep, rounded: Tensor | None = None
) -> None:
    """The reference implementation of ``adamw_``; it scales ``grad`` in place.

    It calls the function behind torch.optim's fused AdamW directly: importing torch.optim's version loads a compiler.
    """
    if step.scale != 1.0:
        grad.mul_(step.scale)
    count = torch.full((), float(step.steps), device=master.device)
    for part, decay in ((slice(0, step.n_decayed), step.weight_decay), (slice(step.n_decayed, len(master)), 0.0)):
        if part.stop > part.start:
            torch._fused_adamw_(
                [master[part]], [grad[part]], [first[part]], [second[part]], [], [count],
                lr=step.lr, beta1=step.beta1, beta2=step.beta2, weight_decay=decay, eps=step.eps,
                amsgrad=False, maximize=False,
            )  # fmt: skip
    if rounded is not None:
        rounded.copy_(master)
