"""Point-to-point sends and receives by global rank, used between pipeline stages."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from realhf.base.activity import ActivityStack


class PendingTransfer(NamedTuple):
    """A send or receive that has not completed; ``direction`` is "to" or "from"."""

    nbytes: int
    direction: str
    rank: int

    def __str__(self) -> str:
        return f"{self.nbytes} bytes {self.direction} rank {self.rank}"


@dataclass(frozen=True)
class PendingRecv:
    """A tensor with a posted receive; its content is valid after ``wait``."""

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
    """Asynchronous sends and receives; messages of a pair keep their order, empty tensors are not sent."""

    def __init__(self, device: torch.device, activity: ActivityStack | None = None) -> None:
        self.device, self.activity = device, activity or ActivityStack()
        self._in_flight: list[tuple[dist.Work, Tensor, int]] = []

    def send(self, tensor: Tensor, rank: int) -> None:
        if not tensor.numel():
            return
        contiguous = tensor.contiguous()
        work = dist.isend(contiguous, rank)
        assert work is not None, "both ranks are members of the default group"
        self._in_flight.append((work, contiguous, rank))
        self._in_flight = [send for send in self._in_flight if not send[0].is_completed()]

    def post_receive(self, shape: tuple[int, ...], dtype: torch.dtype, rank: int) -> PendingRecv:
        tensor = torch.empty(shape, dtype=dtype, device=self.device)
        return PendingRecv(tensor, dist.irecv(tensor, rank) if tensor.numel() else None, rank, self.activity)

    def receive(self, shape: tuple[int, ...], dtype: torch.dtype, rank: int) -> Tensor:
        return self.post_receive(shape, dtype, rank).wait()

    def flush(self, keep: int = 0) -> None:
        """Wait for all sends except the last ``keep``; gloo sends complete only when waited for."""
        while len(self._in_flight) > keep:
            work, tensor, rank = self._in_flight.pop(0)
            with self.activity.enter(PendingTransfer(tensor.nbytes, "to", rank)):
                work.wait()
