"""The product with an adapter: x @ (W + scaling * B @ A).T, as two thin products beside that with W."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from realhf.models.quantized_matrix import Matrix, product
from realhf.ops.moe import ExpertOrder, grouped_linear


@dataclass(frozen=True)
class LowRank:
    """The adapter of one product, whose weight may be several matrices on top of each other (query, key and value).

    ``a`` is ``[R, in]``, the matrices A on top of each other; ``bs`` are the matrices B ``[rows, rank]``, each with the
    first of the R columns that it reads; for a matrix without an adapter an int, its number of rows. Of experts, ``a``
    is ``[E, R, in]`` and ``bs`` is one ``[E, rows, R]``. Their type may differ from that of activations.
    """

    a: Tensor
    bs: tuple[tuple[Tensor | int, int], ...]
    scaling: float

    @property
    def b(self) -> Tensor:
        """All matrices B as one, ``[out, R]``: zero where a matrix does not read a column."""
        first, _ = self.bs[0]
        if len(self.bs) == 1 and isinstance(first, Tensor):
            return first
        rank = self.a.shape[0]
        parts = []
        for matrix, start in self.bs:
            if isinstance(matrix, int):
                parts.append(self.a.new_zeros(matrix, rank))
            else:
                parts.append(F.pad(matrix, (start, rank - start - matrix.shape[1])))
        return torch.cat(parts)

    def add_to(self, y: Tensor, x: Tensor) -> Tensor:
        """Return ``y`` ``[T, out]`` plus the adapter's product with ``x`` ``[T, in]``."""
        inner = F.linear(x, self.a.to(x.dtype))
        return torch.addmm(y, inner, self.b.to(x.dtype).t(), alpha=self.scaling)

    def add_to_experts(self, y: Tensor, x: Tensor, order: ExpertOrder) -> Tensor:
        """Return ``y`` ``[T*k, out]`` plus the product with the tokens of each expert ``x`` ``[T*k, in]``."""
        inner = grouped_linear(x, self.a.to(x.dtype), order)
        return y + grouped_linear(inner, self.b.to(x.dtype), order) * self.scaling

    def merged(self, weight: Tensor) -> Tensor:
        """Return ``weight`` ``[out, in]`` with the adapter."""
        return merged(weight, self.a, self.b, self.scaling)


def merged(weight: Tensor, a: Tensor, b: Tensor, scaling: float) -> Tensor:
    """Return ``weight + scaling * b @ a``, computed in float32, in the type of ``weight``."""
    return (weight.float() + scaling * (b.float() @ a.float())).to(weight.dtype)


def linear(x: Tensor, weight: Matrix, bias: Tensor | None, adapter: LowRank | None) -> Tensor:
    y = product(x, weight, bias)
    return y if adapter is None else adapter.add_to(y, x)


def stacked(a: Tensor, bs: Sequence[Tensor | int], shares_a: bool, scaling: float) -> LowRank:
    """Return the adapter of a product; the matrices B read consecutive columns, or all of them with ``shares_a``."""
    start, placed = 0, list[tuple[Tensor | int, int]]()
    for b in bs:
        placed.append((b, start))
        if isinstance(b, Tensor) and not shares_a:
            start += b.shape[-1]
    return LowRank(a, tuple(placed), scaling)
