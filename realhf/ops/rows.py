"""The layout of packed rows on a device; reductions, broadcasts and masked statistics of packed columns.

Masked statistics are sums that can be all-reduced.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor


def on_device(host: Tensor, device: torch.device) -> Tensor:
    """Return a tensor of host memory on a device; the host does not wait for the copy."""
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host.to(device)


def to_floats(values: Sequence[Tensor | float]) -> list[float]:
    """Return scalars as floats, with one copy for all that are on a GPU."""
    on_gpu = [value.detach().double().reshape(()) for value in values if isinstance(value, Tensor) and value.is_cuda]
    copied = iter(torch.stack(on_gpu).tolist() if on_gpu else [])
    return [next(copied) if isinstance(value, Tensor) and value.is_cuda else float(value) for value in values]


@dataclass(frozen=True, eq=False)
class RowLayout:
    """Rows of ``lengths`` tokens, packed; row i continues row ``prefixes[i] >= 0`` (see ``rotary_attention``).

    A pass computes these index tensors once, on the host, and copies them to ``device`` without waiting.
    """

    lengths: tuple[int, ...]
    prefixes: tuple[int, ...]
    device: torch.device
    _rotations: dict[tuple[int, torch.dtype], tuple[Tensor, Tensor]] = field(default_factory=dict)

    @cached_property
    def before(self) -> tuple[int, ...]:
        """The length of every row's prefix."""
        return tuple(self.lengths[p] if p >= 0 else 0 for p in self.prefixes) or (0,) * len(self.lengths)

    @cached_property
    def longest(self) -> int:
        """The number of positions of the longest row with its prefix; 0 without tokens."""
        return max((first + n for first, n in zip(self.before, self.lengths, strict=True) if n), default=0)

    @cached_property
    def _tokens(self) -> Tensor:
        counts = torch.tensor(self.lengths, dtype=torch.int64)
        n_tokens = sum(self.lengths)
        rows = torch.arange(len(counts)).repeat_interleave(counts, output_size=n_tokens)
        firsts = counts.cumsum(0) - counts - torch.tensor(self.before, dtype=torch.int64)
        return on_device(torch.stack((torch.arange(n_tokens) - firsts[rows], rows)), self.device)

    @property
    def positions(self) -> Tensor:
        """The position of every token, ``[T]``, counted from the start of its row's prefix."""
        return self._tokens[0]

    @property
    def rows(self) -> Tensor:
        """The row of every token, ``[T]``."""
        return self._tokens[1]

    def rotation(self, angles: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the rows of ``Rotary.table`` for all tokens, ``[2, T, 1, d]``; once for all layers."""
        key = id(angles), dtype
        if key not in self._rotations:
            self._rotations[key] = angles, angles[:, self.positions].to(dtype).unsqueeze(2)
        return self._rotations[key][1]

    @cached_property
    def cu_seqlens(self) -> Tensor:
        """The offsets of rows in queries and, with their prefixes, in keys: ``[2, B + 1]`` int32."""
        keys = (first + n for first, n in zip(self.before, self.lengths, strict=True))
        offsets = [list(accumulate(counts, initial=0)) for counts in (self.lengths, keys)]
        return on_device(torch.tensor(offsets, dtype=torch.int32), self.device)

    @cached_property
    def key_index(self) -> Tensor | None:
        """The index that puts every row's prefix in front of its keys, ``[T_k]``; None without prefixes."""
        if not any(self.before):
            return None
        starts = list(accumulate(self.lengths, initial=0))
        parts = []
        for row, (before, own) in enumerate(zip(self.before, self.lengths, strict=True)):
            first = starts[self.prefixes[row]] if before else 0
            parts += [torch.arange(first, first + before), torch.arange(starts[row], starts[row] + own)]
        return on_device(torch.cat(parts), self.device)


def per_token(rows: Tensor, lengths: Sequence[int]) -> Tensor:
    """Repeat each row's entry (``[B, ...]``) over its tokens, ``[T, ...]``."""
    counts = on_device(torch.tensor(lengths, dtype=torch.int64), rows.device)
    return rows.repeat_interleave(counts, 0, output_size=sum(lengths))


@dataclass(frozen=True)
class PackedRows:
    """Reductions over the masked-in tokens of each row; ``mask`` is ``[T]`` bool for rows of ``lengths`` tokens."""

    mask: Tensor
    lengths: Sequence[int]

    @property
    def counts(self) -> Tensor:
        """Masked-in tokens of every row, ``[B]`` float32."""
        return self.sums(torch.ones_like(self.mask, dtype=torch.float32))

    @property
    def last(self) -> Tensor:
        """Index of the last masked-in token of every row, ``[B]`` int64; 0 without one."""
        row = per_token(torch.arange(len(self.lengths), device=self.mask.device), self.lengths)
        index = torch.arange(len(self.mask), device=self.mask.device) * self.mask
        return index.new_zeros(len(self.lengths)).scatter_reduce(0, row, index, "amax")

    def sums(self, x: Tensor) -> Tensor:
        """Return the sum of ``x`` (``[T]``) over each row's masked-in tokens, ``[B]``."""
        row = per_token(torch.arange(len(self.lengths), device=x.device), self.lengths)
        return x.new_zeros(len(self.lengths)).index_add(0, row, x.masked_fill(~self.mask, 0.0))

    def mean(self, x: Tensor) -> Tensor:
        """Return each row's mean of ``x`` at all of its tokens, ``[T]``."""
        return per_token(self.sums(x) / self.counts.clamp(min=1.0), self.lengths)


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
