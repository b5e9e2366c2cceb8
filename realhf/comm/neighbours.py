"""Tensors to and from single workers, by global rank: the wires between pipeline stages."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Arriving:
    """A tensor whose receive is posted; its content is there after ``wait``."""

    tensor: Tensor
    work: dist.Work | None

    def wait(self) -> Tensor:
        if self.work is not None:
            self.work.wait()
        return self.tensor


class Neighbours:
    """Sends do not wait; what they send stays alive until ``flush``. Order per pair is kept; empty tensors stay."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._under_way: list[tuple[dist.Work, Tensor]] = []

    def send(self, tensor: Tensor, rank: int) -> None:
        if not tensor.numel():
            return
        whole = tensor.contiguous()
        work = dist.isend(whole, rank)
        assert work is not None, "stages are never alone in their own group"
        self._under_way.append((work, whole))
        self._under_way = [pair for pair in self._under_way if not pair[0].is_completed()]

    def expect(self, shape: tuple[int, ...], dtype: torch.dtype, rank: int) -> Arriving:
        """Post a receive without waiting for it."""
        tensor = torch.empty(shape, dtype=dtype, device=self.device)
        return Arriving(tensor, dist.irecv(tensor, rank) if tensor.numel() else None)

    def receive(self, shape: tuple[int, ...], dtype: torch.dtype, rank: int) -> Tensor:
        return self.expect(shape, dtype, rank).wait()

    def flush(self, keep: int = 0) -> None:
        """Wait for all sends but the last ``keep``; gloo lets go of none before."""
        while len(self._under_way) > keep:
            self._under_way.pop(0)[0].wait()
