"""Tensors to and from single workers, by global rank: the wires between pipeline stages."""

import torch
import torch.distributed as dist
from torch import Tensor


class Neighbours:
    """Sends do not wait; what they send stays alive until ``flush``. Receives wait. Order per pair is kept."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._under_way: list[tuple[dist.Work, Tensor]] = []

    def send(self, tensor: Tensor, rank: int) -> None:
        whole = tensor.contiguous()
        work = dist.isend(whole, rank)
        assert work is not None, "stages are never alone in their own group"
        self._under_way.append((work, whole))
        self._under_way = [pair for pair in self._under_way if not pair[0].is_completed()]

    def receive(self, shape: tuple[int, ...], dtype: torch.dtype, rank: int) -> Tensor:
        tensor = torch.empty(shape, dtype=dtype, device=self.device)
        if tensor.numel():
            dist.recv(tensor, rank)
        return tensor

    def flush(self) -> None:
        for work, _ in self._under_way:
            work.wait()
        self._under_way = []
