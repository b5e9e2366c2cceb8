"""Intervals of a 1-D tensor: gathered into one piece, and scattered back, as reallocation of weights needs it."""

import torch
from torch import Tensor

from realhf.ops import extension


def slice_intervals(src: Tensor, intervals: Tensor) -> Tensor:
    """Return ``src[a:b]`` for each ``(a, b)`` of ``intervals``, one after the other in the order given.

    ``src`` is 1-D of any dtype, ``intervals`` ``[N, 2]`` int64 on the CPU; they may overlap and be empty. The compiled
    kernel is used where there is one for the device and no gradient is asked for. Raises ValueError for an interval
    that is not inside ``src``.
    """
    wants_grad = torch.is_grad_enabled() and src.requires_grad
    kernel = None if wants_grad else extension.kernel("slice_intervals", src.device.type)
    if kernel is None:
        return slice_intervals_reference(src, intervals)
    try:
        return kernel(src, intervals)
    except RuntimeError:  # the kernel checks, faster than we can; we say what is wrong
        _check(src, intervals)
        raise


def slice_intervals_reference(src: Tensor, intervals: Tensor) -> Tensor:
    """Compute ``slice_intervals`` in plain torch, with gradients."""
    _check(src, intervals)
    return torch.cat([src[:0], *(src[begin:end] for begin, end in intervals.tolist())])


def set_intervals(src: Tensor, dst: Tensor, intervals: Tensor) -> None:
    """Write ``src`` over the ``intervals`` of ``dst``, in place: what ``slice_intervals`` would then return is ``src``.

    ``src`` and ``dst`` are 1-D of one dtype on one device. Raises ValueError for intervals that are not inside
    ``dst``, overlap, or hold another number of elements than ``src``.
    """
    wants_grad = torch.is_grad_enabled() and (src.requires_grad or dst.requires_grad)
    kernel = None if wants_grad or not dst.is_contiguous() else extension.kernel("set_intervals", dst.device.type)
    if kernel is None:
        return set_intervals_reference(src, dst, intervals)
    try:
        kernel(src, dst, intervals)
    except RuntimeError:
        _check_writes(src, dst, intervals)
        raise
    torch.autograd.graph.increment_version(dst)


def set_intervals_reference(src: Tensor, dst: Tensor, intervals: Tensor) -> None:
    """Do what ``set_intervals`` does in plain torch."""
    _check_writes(src, dst, intervals)
    start = 0
    for begin, end in intervals.tolist():
        dst[begin:end] = src[start : start + end - begin]
        start += end - begin


def _check(spread: Tensor, intervals: Tensor) -> None:
    if spread.ndim != 1:
        raise ValueError(f"intervals are of a 1-D tensor, got one of shape {list(spread.shape)}")
    if intervals.dtype != torch.int64 or intervals.device.type != "cpu" or intervals.shape[1:] != (2,):
        raise ValueError(
            "intervals must be [N, 2] int64 on the CPU, "
            f"got {list(intervals.shape)} {intervals.dtype} on {intervals.device}"
        )
    begin, end = intervals.unbind(1)
    wrong = (begin < 0) | (end < begin) | (end > spread.numel())
    if bool(wrong.any()):
        index = int(wrong.nonzero()[0])
        raise ValueError(
            f"interval {index} runs from {begin[index]} to {end[index]} in a tensor of {spread.numel()} elements"
        )


def _check_writes(src: Tensor, dst: Tensor, intervals: Tensor) -> None:
    _check(dst, intervals)
    if src.ndim != 1 or src.dtype != dst.dtype or src.device != dst.device:
        raise ValueError(
            f"src must be 1-D like dst: got {list(src.shape)} {src.dtype} on {src.device}, "
            f"dst {dst.dtype} on {dst.device}"
        )
    begin, end = intervals.unbind(1)
    count = int((end - begin).sum())
    if count != src.numel():
        raise ValueError(f"intervals hold {count} elements, src has {src.numel()}")
    filled = intervals[begin < end]
    ordered = filled[filled[:, 0].argsort()]
    clash = ordered[1:, 0] < ordered[:-1, 1]
    if bool(clash.any()):
        index = int(clash.nonzero()[0])
        raise ValueError(f"intervals to write overlap: {ordered[index].tolist()} and {ordered[index + 1].tolist()}")
