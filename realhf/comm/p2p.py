"""Point-to-point sends and receives by global rank, used between pipeline stages."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from realhf.base.activity import ActivityStack


@dataclass(frozen=True)
class PendingTransfer:
    """A posted send or receive, whose tensor is sent or valid after ``wait``; ``direction`` is "to" or "from"."""

    tensor: Tensor
    work: dist.Work | None
    direction: str
    rank: int
    activity: ActivityStack

    def __str__(self) -> str:
        return f"{self.tensor.nbytes} bytes {self.direction} rank {self.rank}"

    def wait(self) -> Tensor:
        if self.work is not None:
            with self.activity.enter(self):
                self.work.wait()
        return self.tensor


class P2PChannel:
    """Asynchronous sends and receives; messages of a pair keep their order, empty tensors are not sent."""

    def __init__(self, device: torch.device, activity: ActivityStack | None = None) -> None:
        self.device, self.activity = device, activity or ActivityStack()
        self._sends: list[PendingTransfer] = []

    def send(self, tensor: Tensor, rank: int) -> None:
        if not tensor.numel():
            return
        contiguous = tensor.contiguous()
        work = dist.isend(contiguous, rank)
        assert work is not None, "both ranks are members of the default group"
        self._sends.append(PendingTransfer(contiguous, work, "to", rank, self.activity))
        self._sends = [send for send in self._sends if send.work is None or not send.work.is_completed()]

    def post_receive(self, shape: tuple[int, ...], dtype: torch.dtype, rank: int) -> PendingTransfer:
        tensor = torch.empty(shape, dtype=dtype, device=self.device)
        work = dist.irecv(tensor, rank) if tensor.numel() else None
        return PendingTransfer(tensor, work, "from", rank, self.activity)

    def receive(self, shape: tuple[int, ...], dtype: torch.dtype, rank: int) -> Tensor:
        return self.post_receive(shape, dtype, rank).wait()

    def flush(self, keep: int = 0) -> None:
        """Wait for all sends except the last ``keep``; gloo sends complete only when waited for."""
        while len(self._sends) > keep:
            self._sends.pop(0).wait()
