"""The seams of tensor parallelism: where activations enter and leave layers that are cut over a group.

A layer cut by columns is entered through ``enter``, one cut by rows is left through ``leave`` (Megatron-LM, Shoeybi et
al. 2019, section 3: operators f and g).
"""

from typing import Any

import torch
from torch import Tensor

from realhf.comm.parallel import Group


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.group.all_reduce(grad.clone()), None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, partial: Tensor, group: Group) -> Tensor:
        return group.all_reduce(partial.clone())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def enter(x: Tensor, group: Group) -> Tensor:
    """Hand the same activations to every member; their gradients are summed on the way back."""
    return x if group.size == 1 else _Enter.apply(x, group)


def leave(partial: Tensor, group: Group) -> Tensor:
    """Sum the members' partial results; the gradient goes back to each unchanged."""
    return partial if group.size == 1 else _Leave.apply(partial, group)


def gather_columns(part: Tensor, group: Group, widths: tuple[int, ...]) -> Tensor:
    """Lay the members' columns side by side, ``[S, sum(widths)]``; member i has ``widths[i]`` of them. No gradient."""
    if group.size == 1:
        return part
    whole = torch.zeros(part.shape[0], sum(widths), dtype=part.dtype, device=part.device)
    start = sum(widths[: group.index])
    whole[:, start : start + widths[group.index]] = part
    return group.all_reduce(whole)
