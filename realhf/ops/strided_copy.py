"""Copies boxes of tensors, which are usually not contiguous."""

import torch
from torch import Tensor

from realhf.ops import extension


def copy_box(target: Tensor, source: Tensor, streaming: bool = False) -> None:
    """Copy ``source`` to ``target``, of equal shape, any strides, and without overlap.

    ``streaming`` asks for non-temporal stores, for large data that is not read soon. Uses ``Tensor.copy_`` if there is
    no kernel or the dtypes differ.
    """
    same_kind = target.dtype == source.dtype and target.shape == source.shape and target.device == source.device
    wants_grad = torch.is_grad_enabled() and (target.requires_grad or source.requires_grad)
    kernel = extension.kernel("copy_box_", target.device.type) if same_kind and not wants_grad else None
    if kernel is None:
        target.copy_(source)
        return
    kernel(target, source, streaming)
    torch.autograd.graph.increment_version(target)
