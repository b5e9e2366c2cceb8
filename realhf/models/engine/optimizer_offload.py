"""Optimizer state in host memory that passes through a GPU in chunks (ZeRO-Offload, arXiv 2101.06840, with GPU steps).

Copies in both directions overlap with each other and with the updates: a step takes as long as the bus needs for one
direction.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

CHUNK_NUMEL = 1 << 24
"""Elements of a chunk: 64 MB per tensor, long enough for the full bandwidth of the bus."""
N_BUFFERS = 2
"""Chunks on the device at a time: while one is updated and stored, the next one is loaded."""


class ChunkedState:
    """Float32 tensors of equal length in pinned host memory, which are updated on a device."""

    def __init__(self, tensors: Sequence[Tensor], device: torch.device) -> None:
        self.tensors, self.device = tensors, device

    def chunks(self) -> Iterator[tuple[slice, list[Tensor]]]:
        """Yield every chunk's span and its copies on the device; the caller updates these before it continues.

        The updates must be on the current stream. After the last chunk this stream waits until all are stored.
        """
        current = torch.cuda.current_stream(self.device)
        loads, stores = (torch.cuda.Stream(self.device) for _ in range(2))
        total = len(self.tensors[0])
        spans = [slice(start, min(start + CHUNK_NUMEL, total)) for start in range(0, total, CHUNK_NUMEL)]
        width, n_buffers = min(CHUNK_NUMEL, total), min(N_BUFFERS, len(spans))
        buffers = [[torch.empty(width, device=self.device) for _ in self.tensors] for _ in range(n_buffers)]
        loads.wait_stream(current)  # the buffers' memory had other users, and the tensors were stored before
        loaded: list[torch.cuda.Event] = []
        stored: list[torch.cuda.Event] = []

        def load(number: int) -> None:
            span = spans[number]
            with torch.cuda.stream(loads):
                if number >= n_buffers:
                    loads.wait_event(stored[number - n_buffers])
                for tensor, buffer in zip(self.tensors, buffers[number % n_buffers], strict=True):
                    buffer[: span.stop - span.start].copy_(tensor[span], non_blocking=True)
                loaded.append(loads.record_event())

        for number, span in enumerate(spans):
            while len(loaded) < min(number + n_buffers, len(spans)):
                load(len(loaded))
            current.wait_event(loaded[number])
            parts = [buffer[: span.stop - span.start] for buffer in buffers[number % n_buffers]]
            yield span, parts
            stores.wait_event(current.record_event())
            with torch.cuda.stream(stores):
                for tensor, part in zip(self.tensors, parts, strict=True):
                    tensor[span].copy_(part, non_blocking=True)
                stored.append(stores.record_event())
        current.wait_stream(stores)

    def synchronize(self) -> None:
        """Wait until host code can read the tensors."""
        torch.cuda.current_stream(self.device).synchronize()
