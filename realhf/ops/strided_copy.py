"""Boxes of tensors, which seldom lie in one piece of memory: copied from one to another."""

import torch
from torch import Tensor

from realhf.ops import extension


def copy_box(target: Tensor, source: Tensor, streaming: bool = False) -> None:
    """Copy ``source`` over ``target``, of the same shape, with any strides; they share no memory.

    With ``streaming`` the stores go past the caches where they can: for much that is not needed soon. The compiled
    kernel is used where there is one and no type is changed, else ``Tensor.copy_``.
    """
    alike = target.dtype == source.dtype and target.shape == source.shape and target.device == source.device
    wants_grad = torch.is_grad_enabled() and (target.requires_grad or source.requires_grad)
    kernel = extension.kernel("copy_box_", target.device.type) if alike and not wants_grad else None
    if kernel is None:
        target.copy_(source)
        return
    kernel(target, source, streaming)
    torch.autograd.graph.increment_version(target)
