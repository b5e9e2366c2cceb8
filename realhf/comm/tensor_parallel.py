"""The seams of tensor parallelism: where activations enter and leave layers that are cut over a group.

A layer cut by columns is entered through ``enter``, one cut by rows is left through ``leave`` (Megatron-LM, Shoeybi et
al. 2019, section 3: operators f and g). With sequence parallelism (Korthikanti et al. 2022) every member keeps only its
share of the tokens between the seams; the last shares may be smaller, or empty.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from realhf.comm.process_groups import Group


@dataclass(frozen=True)
class TensorParallelRegion:
    """The seams of one pass over ``n_tokens`` tokens."""

    group: Group
    n_tokens: int
    sequence: bool = False

    @property
    def _chunk(self) -> int:
        return -(-self.n_tokens // self.group.size)

    @property
    def local_tokens(self) -> slice:
        """Which tokens this member keeps between the seams."""
        if not self.sequence:
            return slice(0, self.n_tokens)
        start, stop = (min(i * self._chunk, self.n_tokens) for i in (self.group.index, self.group.index + 1))
        return slice(start, stop)

    @property
    def n_local_tokens(self) -> int:
        return self.local_tokens.stop - self.local_tokens.start

    def copy_to_tp(self, x: Tensor) -> Tensor:
        """Give every member all tokens; on the way back gradients are summed (and cut up again)."""
        return x if self.group.size == 1 else _CopyToTP.apply(x, self)

    def reduce_from_tp(self, partial: Tensor) -> Tensor:
        """Sum the members' partial results (and keep my tokens); the gradient goes back to each."""
        return partial if self.group.size == 1 else _ReduceFromTP.apply(partial, self)

    def gather_from_sp(self, x: Tensor) -> Tensor:
        """Give every member all tokens for a computation that all do alike: each gradient is whole already."""
        return _GatherFromSP.apply(x, self) if self.sequence else x

    def all_gather_tokens(self, x: Tensor) -> Tensor:
        """All members' tokens, ``[n_tokens, ...]``; no gradient."""
        if not self.sequence:
            return x
        whole = x.new_empty(self._chunk * self.group.size, *x.shape[1:])
        self.group.all_gather(whole, self._padded(x, self._chunk))
        return whole[: self.n_tokens]

    def reduce_scatter_tokens(self, x: Tensor) -> Tensor:
        """My tokens of the sum over members; no gradient."""
        if not self.sequence:
            return self.group.all_reduce(x.clone())
        mine = x.new_empty(self._chunk, *x.shape[1:])
        self.group.reduce_scatter(mine, self._padded(x, self._chunk * self.group.size))
        return mine[: self.n_local_tokens]

    @staticmethod
    def _padded(x: Tensor, rows: int) -> Tensor:
        """Collectives want equal parts: at most one token a member is added."""
        if x.shape[0] == rows:
            return x.contiguous()
        return torch.cat([x, x.new_zeros(rows - x.shape[0], *x.shape[1:])])


class _CopyToTP(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, seams: TensorParallelRegion) -> Tensor:
        ctx.seams = seams
        return seams.all_gather_tokens(x) if seams.sequence else x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.seams.reduce_scatter_tokens(grad), None


class _ReduceFromTP(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, partial: Tensor, seams: TensorParallelRegion) -> Tensor:
        ctx.seams = seams
        return seams.reduce_scatter_tokens(partial)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.seams.all_gather_tokens(grad), None


class _GatherFromSP(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, seams: TensorParallelRegion) -> Tensor:
        ctx.seams = seams
        return seams.all_gather_tokens(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad[ctx.seams.local_tokens], None


def gather_columns(part: Tensor, group: Group, start: int, width: int) -> Tensor:
    """Return all members' columns, ``[S, width]``, of which mine begin at ``start``. No gradient."""
    if group.size == 1:
        return part
    whole = torch.zeros(part.shape[0], width, dtype=part.dtype, device=part.device)
    whole[:, start : start + part.shape[1]] = part
    return group.all_reduce(whole)
