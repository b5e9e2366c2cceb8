"""Masked statistics of packed columns, as sums that can be all-reduced."""

from collections.abc import Sequence

import torch
from torch import Tensor

from realhf.ops.rows import per_token


def masked_sums(x: Tensor, mask: Tensor) -> Tensor:
    """Return (sum, sum of squares, count) of ``x`` where ``mask`` is nonzero, ``[3]`` float64."""
    kept = x.double().masked_fill(~mask.bool(), 0.0)
    return torch.stack([kept.sum(), kept.square().sum(), mask.bool().sum().double()])


def normalise(x: Tensor, mask: Tensor, sums: Tensor) -> Tensor:
    """Return ``(x - mean) / (std + 1e-5)`` in the dtype of ``x``, 0 where ``mask`` is 0.

    The mean and population variance come from ``sums``, ``[..., 3]``: ``masked_sums`` summed over ranks; leading
    dimensions must broadcast against ``x``. A count of 0 means mean 0 and variance 0.
    """
    total, squares, count = sums.unbind(-1)
    mean = total / count.clamp(min=1.0)
    variance = (squares / count.clamp(min=1.0) - mean.square()).clamp(min=0.0)
    return ((x.double() - mean) / (variance.sqrt() + 1e-5)).masked_fill(~mask.bool(), 0.0).to(x.dtype)


def group_normalise(x: Tensor, mask: Tensor, lengths: Sequence[int], group_of_row: Sequence[int]) -> Tensor:
    """Normalise ``x`` (``[T]``, rows of ``lengths``) with the statistics of each row's group, 0 where masked.

    Rows with equal integers in ``group_of_row`` (``[B]``) form a group; they need not be adjacent.
    """
    if not lengths:
        return torch.zeros_like(x)
    row_sums = [masked_sums(a, b) for a, b in zip(x.split(tuple(lengths)), mask.split(tuple(lengths)), strict=True)]
    groups, index = torch.tensor(group_of_row).unique(return_inverse=True)
    # on the CPU, where the order of additions is fixed
    sums = torch.zeros(len(groups), 3, dtype=torch.float64).index_add(0, index, torch.stack(row_sums).cpu())
    return normalise(x, mask, per_token(sums[index], lengths).to(x.device))
