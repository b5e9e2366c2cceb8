"""Gathers intervals of a 1-D tensor into a contiguous one and scatters them back, for parameter reallocation."""

import torch
from torch import Tensor

from realhf.ops import extension


def slice_intervals(src: Tensor, intervals: Tensor) -> Tensor:
    """Return the concatenation of ``src[a:b]`` for each ``(a, b)`` of ``intervals``.

    ``src`` is 1-D of any dtype, ``intervals`` is ``[N, 2]`` int64 on the CPU; they may overlap and be empty. Raises
    ValueError for an interval outside ``src``.
    """
    wants_grad = torch.is_grad_enabled() and src.requires_grad
    kernel = None if wants_grad else extension.kernel("slice_intervals", src.device.type)
    if kernel is None:
        return slice_intervals_reference(src, intervals)
    try:
        return kernel(src, intervals)
    except RuntimeError:  # the kernel checks faster, this check has the better message
        _check(src, intervals)
        raise


def slice_intervals_reference(src: Tensor, intervals: Tensor) -> Tensor:
    """The reference implementation of ``slice_intervals``; differentiable."""
    _check(src, intervals)
    return torch.cat([src[:0], *(src[begin:end] for begin, end in intervals.tolist())])


def set_intervals(src: Tensor, dst: Tensor, intervals: Tensor) -> None:
    """Write ``src`` to the ``intervals`` of ``dst`` in place: the inverse of ``slice_intervals``.

    ``src`` and ``dst`` are 1-D of one dtype on one device. Raises ValueError for intervals outside ``dst``, for
    overlapping ones, and for a total length other than that of ``src``.
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
    _check_writes(src, dst, intervals)
    start = 0
    for begin, end in intervals.tolist():
        dst[begin:end] = src[start : start + end - begin]
        start += end - begin


def _check(tensor: Tensor, intervals: Tensor) -> None:
    if tensor.ndim != 1:
        raise ValueError(f"intervals need a 1-D tensor, got shape {list(tensor.shape)}")
    if intervals.dtype != torch.int64 or intervals.device.type != "cpu" or intervals.shape[1:] != (2,):
        raise ValueError(
            "intervals must be [N, 2] int64 on the CPU, "
            f"got {list(intervals.shape)} {intervals.dtype} on {intervals.device}"
        )
    begin, end = intervals.unbind(1)
    invalid = (begin < 0) | (end < begin) | (end > tensor.numel())
    if bool(invalid.any()):
        index = int(invalid.nonzero()[0])
        raise ValueError(
            f"interval {index} runs from {begin[index]} to {end[index]} in a tensor of {tensor.numel()} elements"
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
        raise ValueError(f"intervals have {count} elements, src has {src.numel()}")
    nonempty = intervals[begin < end]
    ordered = nonempty[nonempty[:, 0].argsort()]
    overlaps = ordered[1:, 0] < ordered[:-1, 1]
    if bool(overlaps.any()):
        index = int(overlaps.nonzero()[0])
        raise ValueError(f"intervals to write overlap: {ordered[index].tolist()} and {ordered[index + 1].tolist()}")
