"""Tensors to and from single workers, by global rank: the wires between pipeline stages."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from realhf.base.activity import ActivityStack


class PendingTransfer(NamedTuple):
    """A tensor that a neighbour has not sent or taken yet."""

    nbytes: int
    way: str
    rank: int

    def __str__(self) -> str:
        return f"{self.nbytes} bytes {self.way} rank {self.rank}"


@dataclass(frozen=True)
class PendingRecv:
    """A tensor whose receive is posted; its content is there after ``wait``."""

    tensor: Tensor
    work: dist.Work | None
    rank: int
    activity: ActivityStack

    def wait(self) -> Tensor:
        if self.work is not None:
            with self.activity.enter(PendingTransfer(self.tensor.nbytes, "from", self.rank)):
                self.work.wait()
        return self.tensor


class P2PChannel:
    """Sends do not wait; what they send stays alive until ``flush``. Order per pair is kept; empty tensors stay."""

    def __init__(self, device: torch.device, activity: ActivityStack | None = None) -> None:
        self.device, self.activity = device, activity or ActivityStack()
        self._under_way: list[tuple[dist.Work, Tensor, int]] = []

    def send(self, tensor: Tensor, rank: int) -> None:
        if not tensor.numel():
            return
        whole = tensor.contiguous()
        work = dist.isend(whole, rank)
        assert work is not None, "stages are never alone in their own group"
        self._under_way.append((work, whole, rank))
        self._under_way = [sent for sent in self._under_way if not sent[0].is_completed()]

    def post_receive(self, shape: tuple[int, ...], dtype: torch.dtype, rank: int) -> PendingRecv:
        """Post a receive without waiting for it."""
        tensor = torch.empty(shape, dtype=dtype, device=self.device)
        return PendingRecv(tensor, dist.irecv(tensor, rank) if tensor.numel() else None, rank, self.activity)

    def receive(self, shape: tuple[int, ...], dtype: torch.dtype, rank: int) -> Tensor:
        return self.post_receive(shape, dtype, rank).wait()

    def flush(self, keep: int = 0) -> None:
        """Wait for all sends but the last ``keep``; gloo lets go of none before."""
        while len(self._under_way) > keep:
            work, tensor, rank = self._under_way.pop(0)
            with self.activity.enter(PendingTransfer(tensor.nbytes, "to", rank)):
                work.wait()
