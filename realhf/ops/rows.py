"""Per-row reductions and broadcasts of packed columns."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


def per_token(rows: Tensor, lengths: Sequence[int]) -> Tensor:
    """Repeat each row's entry (``[B, ...]``) over its tokens, ``[T, ...]``."""
    counts = torch.tensor(lengths, dtype=torch.int64, device=rows.device)
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

    def sums(self, x: Tensor) -> Tensor:
        """Return the sum of ``x`` (``[T]``) over each row's masked-in tokens, ``[B]``."""
        row = per_token(torch.arange(len(self.lengths), device=x.device), self.lengths)
        return x.new_zeros(len(self.lengths)).index_add(0, row, x.masked_fill(~self.mask, 0.0))

    def mean(self, x: Tensor) -> Tensor:
        """Return each row's mean of ``x`` at all of its tokens, ``[T]``."""
        return per_token(self.sums(x) / self.counts.clamp(min=1.0), self.lengths)
