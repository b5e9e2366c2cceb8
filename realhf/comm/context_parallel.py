"""Tokens of context parallelism: members have an early and a late chunk each, which makes causal attention even.

With c members there are 2c chunks; member i has those with the numbers i and 2c - 1 - i (Llama 3, arXiv 2407.21783,
section 3.3.2).
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from realhf.comm.tensor_parallel import TensorParallelRegion


@dataclass(frozen=True)
class ContextRegion(TensorParallelRegion):
    """The collectives of one pass over ``n_tokens`` tokens, whose members have different ones at any time."""

    sequence: bool = True

    @property
    def _size(self) -> int:
        """Tokens of a chunk; the last ones may have fewer."""
        return -(-self.n_tokens // (2 * self.group.size))

    def _runs(self, member: int) -> tuple[range, range]:
        numbers = member, 2 * self.group.size - 1 - member
        first, last = (
            range(min(n * self._size, self.n_tokens), min((n + 1) * self._size, self.n_tokens)) for n in numbers
        )
        return first, last

    @property
    def runs(self) -> tuple[range, range]:
        """The adjacent tokens that this member has."""
        return self._runs(self.group.index)

    @property
    def n_local_tokens(self) -> int:
        return sum(map(len, self.runs))

    def local(self, x: Tensor) -> Tensor:
        """Return this member's tokens of ``x`` ``[n_tokens, ...]``."""
        first, last = self.runs
        return torch.cat((x[first.start : first.stop], x[last.start : last.stop]))

    @cached_property
    def _places(self) -> Tensor:
        """The place of every token among those of all members, each padded to two chunks; ``[n_tokens]``."""
        places = torch.empty(self.n_tokens, dtype=torch.int64)
        for member in range(self.group.size):
            start = 2 * member * self._size
            for run in self._runs(member):
                places[run.start : run.stop] = torch.arange(start, start + len(run))
                start += len(run)
        return places

    def all_gather_tokens(self, x: Tensor) -> Tensor:
        whole = x.new_empty(2 * self._size * self.group.size, *x.shape[1:])
        self.group.all_gather(whole, self._padded(x, 2 * self._size))
        return whole.index_select(0, self._places.to(x.device))

    def reduce_scatter_tokens(self, x: Tensor) -> Tensor:
        whole = x.new_zeros(2 * self._size * self.group.size, *x.shape[1:])
        whole.index_copy_(0, self._places.to(x.device), x)
        local = x.new_empty(2 * self._size, *x.shape[1:])
        self.group.reduce_scatter(local, whole)
        return local[: self.n_local_tokens]
