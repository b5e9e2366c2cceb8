"""Streams and events with vector clocks: an operation that is not ordered after a conflicting one is a race.

Every stream counts its operations. Its clock says how many operations of every stream are complete before its next one;
events carry clocks from one stream to another, and a wait of the host carries one to all operations started later.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from tests.gpu_emulated.device_tensor import DeviceTensor, leaves

if TYPE_CHECKING:
    from tests.gpu_emulated.fake_cuda import FakeCuda

Clock = dict[int, int]


def merge(clock: Clock, other: Clock) -> None:
    for stream, time in other.items():
        clock[stream] = max(clock.get(stream, 0), time)


class Access(NamedTuple):
    """An access to bytes of a storage by an operation: the ``time``-th of its stream."""

    storage: torch.UntypedStorage
    start: int
    stop: int
    is_write: bool
    stream: int
    time: int
    what: str


class FakeStream:
    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda, self.clock = cuda, Clock()
        self.number = cuda.n_streams = cuda.n_streams + 1

    def wait_stream(self, other: FakeStream) -> None:
        merge(self.clock, other.clock)

    def wait_event(self, event: FakeEvent) -> None:
        merge(self.clock, event.clock)

    def record_event(self, event: FakeEvent | None = None) -> FakeEvent:
        event = event or FakeEvent(self.cuda)
        event.record(self)
        return event

    def synchronize(self) -> None:
        self.cuda.note("wait", "stream")
        merge(self.cuda.host_clock, self.clock)


class FakeEvent:
    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda, self.clock = cuda, Clock()

    def record(self, stream: FakeStream | None = None) -> None:
        self.clock = dict((stream or self.cuda.stream).clock)

    def wait(self, stream: FakeStream | None = None) -> None:
        merge((stream or self.cuda.stream).clock, self.clock)

    def query(self) -> bool:
        return not self.cuda.pending

    def synchronize(self) -> None:
        self.cuda.note("wait", "event")
        merge(self.cuda.host_clock, self.clock)


class RaceDetector:
    """Raises RuntimeError for an access that is not ordered after a conflicting one of another stream."""

    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda = cuda
        self.accesses: dict[int, list[Access]] = {}

    def operation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """Record an operation of the current stream, which reads its arguments and writes results and some of them."""
        stream = self.cuda.stream
        merge(stream.clock, self.cuda.host_clock)
        time = stream.clock[stream.number] = stream.clock.get(stream.number, 0) + 1
        named = [*zip(func._schema.arguments, args, strict=False)]
        named += [(a, kwargs[a.name]) for a in func._schema.arguments if a.name in kwargs]
        for argument, value in named:
            is_write = argument.alias_info is not None and argument.alias_info.is_write
            for tensor in leaves(value):
                self._access(tensor, is_write, stream, time, str(func))
        for tensor in leaves(out):
            self._access(tensor, True, stream, time, str(func))

    def _access(self, tensor: Any, is_write: bool, stream: FakeStream, time: int, what: str) -> None:
        if not isinstance(tensor, Tensor) or not tensor.numel():
            return
        inner = tensor.inner if isinstance(tensor, DeviceTensor) else tensor
        storage, size = inner.untyped_storage(), inner.element_size()
        start = inner.storage_offset() * size
        extent = sum((n - 1) * step for n, step in zip(inner.shape, inner.stride(), strict=True)) + 1
        new = Access(storage, start, start + extent * size, is_write, stream.number, time, what)
        others = self.accesses.setdefault(storage._cdata, [])
        for old in others:
            overlaps = old.start < new.stop and new.start < old.stop
            is_ordered = old.time <= stream.clock.get(old.stream, 0)
            if overlaps and (old.is_write or new.is_write) and not is_ordered:
                raise RuntimeError(f"race: {what} on stream {stream.number} is not ordered after {old.what} of stream"
                                   f" {old.stream} on the same memory")  # fmt: skip
        others.append(new)

    def unordered(self) -> list[Access]:
        """Return the accesses that are not ordered before the next operation of the current stream."""
        clock = {**self.cuda.stream.clock}
        merge(clock, self.cuda.host_clock)
        return [a for some in self.accesses.values() for a in some if a.time > clock.get(a.stream, 0)]


@contextmanager
def on_stream(cuda: FakeCuda, stream: FakeStream) -> Iterator[None]:
    before, cuda.stream = cuda.stream, stream
    try:
        yield
    finally:
        cuda.stream = before
