"""Autograd collectives at the boundaries of tensor-parallel regions.

``copy_to_tp`` precedes a column-parallel layer, ``reduce_from_tp`` follows a row-parallel one (Megatron-LM, Shoeybi et
al. 2019, section 3: operators f and g). With sequence parallelism (Korthikanti et al. 2022) every member holds only its
shard of the tokens between regions; the last shards may be smaller or empty.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from realhf.comm.process_groups import Group

TensorFunction = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class PendingTokens:
    """The tokens of a collective that may still run: the first ``n_tokens`` of ``result``."""

    group: Group
    name: str
    result: Tensor
    n_tokens: int
    work: dist.Work | None = None

    def wait(self) -> Tensor:
        if self.work is not None:
            self.group.wait(self.work, self.name, self.result)
        return self.result[: self.n_tokens]


@dataclass(frozen=True)
class TensorParallelRegion:
    """The collectives of one pass over ``n_tokens`` tokens.

    ``overlaps``: backward passes compute gradients of weights during collectives (``models/column_parallel.py``).
    """

    group: Group
    n_tokens: int
    sequence: bool = False
    overlaps: bool = False

    @property
    def _chunk(self) -> int:
        return -(-self.n_tokens // self.group.size)

    @property
    def local_tokens(self) -> slice:
        """The tokens that this member holds between regions."""
        if not self.sequence:
            return slice(0, self.n_tokens)
        start, stop = (min(i * self._chunk, self.n_tokens) for i in (self.group.index, self.group.index + 1))
        return slice(start, stop)

    @property
    def n_local_tokens(self) -> int:
        return self.local_tokens.stop - self.local_tokens.start

    def local(self, x: Tensor) -> Tensor:
        """Return this member's tokens of ``x`` ``[n_tokens, ...]``."""
        return x[self.local_tokens]

    def copy_to_tp(self, x: Tensor) -> Tensor:
        """Forward: all tokens on every member. Backward: sum of gradients (sharded with sequence parallelism)."""
        return x if self.group.size == 1 else _Collective.apply(x, self.all_gather_tokens, self.reduce_scatter_tokens)

    def reduce_from_tp(self, partial: Tensor) -> Tensor:
        """Forward: sum of partial results (local tokens with sequence parallelism). Backward: gradient to all."""
        if self.group.size == 1:
            return partial
        return _Collective.apply(partial, self.reduce_scatter_tokens, self.all_gather_tokens)

    def gather_from_sp(self, x: Tensor) -> Tensor:
        """Forward: all tokens, for a replicated computation. Backward: local slice, since gradients are equal."""
        if not self.sequence:
            return x
        return _Collective.apply(x, self.all_gather_tokens, self.local)

    def all_gather_tokens(self, x: Tensor) -> Tensor:
        """Return all members' tokens, ``[n_tokens, ...]``; not differentiable."""
        if not self.sequence:
            return x
        whole = x.new_empty(self._chunk * self.group.size, *x.shape[1:])
        self.group.all_gather(whole, self._padded(x, self._chunk))
        return whole[: self.n_tokens]

    def reduce_scatter_tokens(self, x: Tensor) -> Tensor:
        """Return the local tokens of the sum over members; not differentiable."""
        if not self.sequence:
            return self.group.all_reduce(x.clone())
        local = x.new_empty(self._chunk, *x.shape[1:])
        self.group.reduce_scatter(local, self._padded(x, self._chunk * self.group.size))
        return local[: self.n_local_tokens]

    def start_all_gather_tokens(self, x: Tensor) -> PendingTokens:
        """Start ``all_gather_tokens``."""
        if not self.sequence:
            return PendingTokens(self.group, "all_gather", x, self.n_tokens)
        whole = x.new_empty(self._chunk * self.group.size, *x.shape[1:])
        work = self.group.start_all_gather(whole, self._padded(x, self._chunk))
        return PendingTokens(self.group, "all_gather", whole, self.n_tokens, work)

    def start_reduce_scatter_tokens(self, x: Tensor) -> PendingTokens:
        """Start ``reduce_scatter_tokens``, which may overwrite ``x``."""
        if not self.sequence:
            x = x.contiguous()
            return PendingTokens(self.group, "all_reduce", x, self.n_tokens, self.group.start_all_reduce(x))
        local = x.new_empty(self._chunk, *x.shape[1:])
        work = self.group.start_reduce_scatter(local, self._padded(x, self._chunk * self.group.size))
        return PendingTokens(self.group, "reduce_scatter", local, self.n_local_tokens, work)

    @staticmethod
    def _padded(x: Tensor, rows: int) -> Tensor:
        """Pad for collectives, which need equal shards, by at most one token per member."""
        if x.shape[0] == rows:
            return x.contiguous()
        return torch.cat([x, x.new_zeros(rows - x.shape[0], *x.shape[1:])])


class _Collective(torch.autograd.Function):
    """Applies one function, and another one to the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: TensorFunction, backward: TensorFunction) -> Tensor:
        ctx.backward_fn = backward
        return forward(x.view_as(x))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.backward_fn(grad), None, None


def gather_columns(columns: Tensor, group: Group, start: int, width: int) -> Tensor:
    """Return all members' columns, ``[S, width]``; this member's begin at ``start``. Not differentiable."""
    if group.size == 1:
        return columns
    whole = columns.new_zeros(columns.shape[0], width)
    whole[:, start : start + columns.shape[1]] = columns
    return group.all_reduce(whole)
