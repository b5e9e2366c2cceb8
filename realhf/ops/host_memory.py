"""Memory of the host for tensors that are written at once, and soon freed."""

import math
import mmap

import torch
from torch import Tensor

HUGE_PAGE = 1 << 21


def zeros_on_huge_pages(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return zeros on pages of 2 MiB where Linux has them: there is one page fault per page and not per 4 KiB."""
    n_bytes = math.prod(shape) * dtype.itemsize
    if not n_bytes:
        return torch.zeros(shape, dtype=dtype)
    pages = mmap.mmap(-1, n_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE") and n_bytes >= HUGE_PAGE:
        pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=dtype, count=math.prod(shape)).view(shape)
