"""The product with an adapter: x @ (W + scaling * B @ A).T, as two thin products beside that with W."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from realhf.base.seeds import stable_seed
from realhf.models.quantized_matrix import Matrix, product
from realhf.ops.moe import ExpertOrder, grouped_linear


@dataclass(frozen=True)
class Dropout:
    """Dropout of the inputs of adapters in a training pass.

    Whether an element is dropped depends on a key of its token and one of its column, so the result is the same in all
    layouts and micro-batches, and when activations are computed again. ``keys`` are of all tokens, ``[T]`` int32.
    """

    keys: Tensor
    rate: float

    def __call__(self, x: Tensor, columns: Tensor) -> Tensor:
        """Return ``x`` ``[T, in]`` with zeros; ``columns`` are the keys of its columns, ``[in]`` int32."""
        return _Dropout.apply(x, self.keys, columns, self.rate)


class _Dropout(torch.autograd.Function):
    """Computes the mask again in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, keys: Tensor, columns: Tensor, rate: float) -> Tensor:
        ctx.save_for_backward(keys, columns)
        ctx.rate = rate
        return _dropped(x, keys, columns, rate)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        keys, columns = ctx.saved_tensors
        return _dropped(grad, keys, columns, ctx.rate), None, None, None


def _dropped(x: Tensor, keys: Tensor, columns: Tensor, rate: float) -> Tensor:
    numbers = mixed(keys[:, None] ^ columns)  # uniform in all of int32
    is_dropped = numbers < int(rate * 2**32) - 2**31
    return (x / (1 - rate)).masked_fill_(is_dropped, 0.0)


def mixed(x: Tensor) -> Tensor:
    """Mix the bits of int32 numbers, in place: the finalizer of MurmurHash3."""
    x ^= (x >> 16) & 0xFFFF
    x *= -2048144789
    x ^= (x >> 13) & 0x7FFFF
    x *= -1028477387
    x ^= (x >> 16) & 0xFFFF
    return x


def token_keys(rows: Sequence[int], lengths: Sequence[int], device: torch.device) -> Tensor:
    """Return the keys of the tokens of rows with these seeds, ``[T]`` int32."""
    keys = [_numbered(seed, 0, length) for seed, length in zip(rows, lengths, strict=True)]
    return torch.cat([torch.empty(0, dtype=torch.int32), *keys]).to(device)


def column_keys(product: str, start: int, stop: int, device: torch.device) -> Tensor:
    """Return the keys of the columns ``start`` to ``stop`` of the product with this name, ``[stop - start]`` int32."""
    return _numbered(stable_seed(product), start, stop).to(device)


def _numbered(seed: int, start: int, stop: int) -> Tensor:
    """Return random numbers that depend on a seed and on integers from ``start`` to ``stop``."""
    return mixed(mixed(torch.arange(start, stop, dtype=torch.int32)) ^ seed % (2**31 - 1))


@dataclass(frozen=True)
class LowRank:
    """The adapter of one product, whose weight may be several matrices on top of each other (query, key and value).

    ``a`` is ``[R, in]``, the matrices A on top of each other; ``bs`` are the matrices B ``[rows, rank]``, each with the
    first of the R columns that it reads; for a matrix without an adapter an int, its number of rows. Of experts, ``a``
    is ``[E, R, in]`` and ``bs`` is one ``[E, rows, R]``, of gate and up ``[E, 2, wide, R]``. Their type may differ from
    that of activations. With dropout, ``columns`` are the keys of the inputs.
    """

    a: Tensor
    bs: tuple[tuple[Tensor | int, int], ...]
    scaling: float
    columns: Tensor | None = None

    @property
    def b(self) -> Tensor:
        """All matrices B as one, ``[out, R]``: zero where a matrix does not read a column."""
        first, _ = self.bs[0]
        if len(self.bs) == 1 and isinstance(first, Tensor):
            # a view of every pass: one that was made in a pass without gradients would have none
            return first.flatten(1, 2) if first.dim() == 4 else first
        rank = self.a.shape[0]
        parts = []
        for matrix, start in self.bs:
            if isinstance(matrix, int):
                parts.append(self.a.new_zeros(matrix, rank))
            else:
                parts.append(F.pad(matrix, (start, rank - start - matrix.shape[1])))
        return torch.cat(parts)

    def add_to(self, y: Tensor, x: Tensor, dropout: Dropout | None = None) -> Tensor:
        """Return ``y`` ``[T, out]`` plus the adapter's product with ``x`` ``[T, in]``."""
        if dropout is not None and self.columns is not None:
            x = dropout(x, self.columns)
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


def linear(
    x: Tensor, weight: Matrix, bias: Tensor | None, adapter: LowRank | None, dropout: Dropout | None = None
) -> Tensor:
    y = product(x, weight, bias)
    return y if adapter is None else adapter.add_to(y, x, dropout)


def stacked(
    a: Tensor, bs: Sequence[Tensor | int], firsts: Sequence[int], scaling: float, columns: Tensor | None = None
) -> LowRank:
    """Return the adapter of a product; matrix B ``i`` reads the columns of matrix A number ``firsts[i]``."""
    placed = [(b, 0 if isinstance(b, int) else first * b.shape[-1]) for b, first in zip(bs, firsts, strict=True)]
    return LowRank(a, tuple(placed), scaling, columns)
