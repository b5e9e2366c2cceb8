"""Point-to-point sends and receives by global rank, used between pipeline stages."""

import datetime
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from realhf.base.activity import ActivityStack


@dataclass(frozen=True)
class DirectedGroups:
    """The process groups of messages to higher ranks and to lower ranks; None is the default group.

    Within a group, NCCL executes the messages of two ranks in the order in which each of them posts its sends and
    receives. In 1F1B, and if both ranks send first, the two orders differ between the directions but not within one.
    """

    up: dist.ProcessGroup | None = None
    down: dist.ProcessGroup | None = None

    def of(self, src: int, dst: int) -> dist.ProcessGroup | None:
        return self.up if src < dst else self.down


def make_directed_groups(timeout_s: float) -> DirectedGroups:
    """Create the groups of both directions. Collective over all workers; gloo has no such order and needs none."""
    if dist.get_backend() == "gloo":
        return DirectedGroups()
    timeout = datetime.timedelta(seconds=timeout_s)
    return DirectedGroups(*(dist.new_group(timeout=timeout) for _ in range(2)))


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
        """Wait for the transfer; RuntimeError names it, for example at its deadline."""
        if self.work is not None:
            with self.activity.enter(self):
                try:
                    self.work.wait()
                except RuntimeError as error:
                    raise RuntimeError(f"transfer of {self} failed: {error}") from error
        return self.tensor


class P2PChannel:
    """Asynchronous sends and receives; messages of a pair keep their order, empty tensors are not sent."""

    def __init__(
        self,
        device: torch.device,
        activity: ActivityStack | None = None,
        groups: DirectedGroups | None = None,
    ) -> None:
        self.device, self.activity = device, activity or ActivityStack()
        self.groups = groups or DirectedGroups()
        self._sends: list[PendingTransfer] = []

    def send(self, tensor: Tensor, rank: int) -> None:
        if not tensor.numel():
            return
        contiguous = tensor.contiguous()
        work = dist.isend(contiguous, rank, group=self.groups.of(dist.get_rank(), rank))
        assert work is not None, "both ranks are members of the group"
        self._sends.append(PendingTransfer(contiguous, work, "to", rank, self.activity))
        self._sends = [send for send in self._sends if send.work is None or not send.work.is_completed()]

    def post_receive(self, shape: tuple[int, ...], dtype: torch.dtype, rank: int) -> PendingTransfer:
        tensor = torch.empty(shape, dtype=dtype, device=self.device)
        group = self.groups.of(rank, dist.get_rank()) if tensor.numel() else None
        work = dist.irecv(tensor, rank, group=group) if tensor.numel() else None
        return PendingTransfer(tensor, work, "from", rank, self.activity)

    def receive(self, shape: tuple[int, ...], dtype: torch.dtype, rank: int) -> Tensor:
        return self.post_receive(shape, dtype, rank).wait()

    def swap(self, tensor: Tensor, rank: int) -> Tensor:
        """Send a tensor to a rank that does the same, and return its tensor of the same shape.

        One batch on the default group: two messages would make each end wait for the other in its first send.
        """
        contiguous = tensor.contiguous()
        received = torch.empty_like(contiguous)
        works = dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, contiguous, rank), dist.P2POp(dist.irecv, received, rank)]
        )
        for direction, work in zip(("from", "to"), reversed(works), strict=False):  # NCCL returns one for the batch
            PendingTransfer(received, work, direction, rank, self.activity).wait()
        return received

    def flush(self, keep: int = 0) -> None:
        """Wait for all sends except the last ``keep``; gloo sends complete only when waited for."""
        while len(self._sends) > keep:
            self._sends.pop(0).wait()
