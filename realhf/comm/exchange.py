"""Executes point-to-point copies of rows or parameter boxes, by shared memory within a host, else the process group."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from realhf.base.activity import ActivityStack
from realhf.comm.packets import Copy, ExchangeBuffers, P2PCopy, Packet, TensorSlice, packets_of, plain_copy, relayed
from realhf.comm.shared_memory import SLOT_BYTES, SharedMemoryPeers

__all__ = ["P2PCopy", "TensorSlice", "exchange"]

BUCKET_BYTES = 4 << 20
ALONE_BYTES = 256 << 10
"""Slices of this size get a bucket of their own, which needs no packing if their memory is contiguous."""
BUFFER_BYTES = 8 << 20
"""Limit of packed bytes in flight: buffers should stay in the cache."""
STREAMED_BYTES = 16 << 20
"""Received bytes from which non-temporal stores are used: the data would evict everything else from the cache."""


@torch.no_grad()
def exchange(
    copies: Sequence[P2PCopy],
    rank: int,
    read: Callable[[Any], Tensor],
    write: Callable[[Any, Tensor], None],
    device: torch.device,
    *,
    into: Callable[[Any], Tensor] | None = None,
    peers: SharedMemoryPeers | None = None,
    verify: bool = False,
    copy: Copy = plain_copy,
    activity: ActivityStack | None = None,
) -> int:
    """Execute the copies from and to this worker, of a list that every worker passes; return the bytes received.

    ``read(what)`` returns the elements to send (any shape), ``write(what, flat)`` takes ownership of received ones.
    If ``into`` is given, ``into(what)`` returns the target tensor (any shape and strides) and ``write`` is not called,
    which saves a copy and large temporary memory; receivers on other hosts than the sender then relay a broadcast
    (``relayed`` states which copies a rank must pass). All three may be called repeatedly. ``copy`` copies locally.

    Workers in ``peers`` are reached through shared memory, others through the default process group. Every wait has
    the timeout of its transport and is entered in ``activity``. With ``verify``, checksums of received data are
    compared; RuntimeError names the data that differs.
    """
    activity = activity or ActivityStack()
    expected = sum(c.tensor_slice.nbytes for c in copies if c.dst == rank)
    buffers = ExchangeBuffers(rank, read, write, into, device, verify, copy, expected > STREAMED_BYTES, expected)
    within = [c for c in copies if c.dst == rank and (c.src == rank or not c.tensor_slice.numel)]
    local = chain.from_iterable(_copy_local(c, buffers) for c in within)
    near = peers.ranks if peers else frozenset()
    with activity.enter(buffers):
        rounds = relayed(copies, peers.hosts if peers else {}) if into is not None else (copies,)
        for round_ in rounds:
            own = [c for c in round_ if rank in (c.src, c.dst) and c.src != c.dst and c.tensor_slice.numel]
            remote = _Buckets(buffers, activity, [c for c in own if not near.intersection((c.src, c.dst))])
            remote.start()
            if peers is not None and near:
                _via_shared_memory(round_, peers, buffers, local)
            remote.finish(local)
    return buffers.received


def _copy_local(copy: P2PCopy, buffers: ExchangeBuffers) -> Iterator[bool]:
    """Execute a copy within this worker, in steps of about ``SLOT_BYTES``."""
    slice_ = copy.tensor_slice
    is_own = copy.src == buffers.rank
    values = buffers.read(copy.what) if is_own else torch.empty(0, dtype=slice_.dtype, device=buffers.device)
    if buffers.into is None:
        buffers.write(copy.what, values.reshape(-1))
        yield True
    elif slice_.numel:
        target = buffers.into(copy.what)
        values = values.view(target.shape)
        n_rows = max(1, SLOT_BYTES * len(target) // slice_.nbytes)
        for first in range(0, len(target), n_rows):
            value = values[first : first + n_rows]
            buffers.copy(target[first : first + n_rows], value, buffers.streaming and value.is_contiguous())
            yield True


def _via_shared_memory(
    copies: Iterable[P2PCopy], peers: SharedMemoryPeers, buffers: ExchangeBuffers, background: Iterator[bool]
) -> None:
    near, by_sender = peers.ranks | {buffers.rank}, dict[int, list[P2PCopy]]()
    for copy in copies:
        if copy.src != copy.dst and copy.tensor_slice.numel and near.issuperset((copy.src, copy.dst)):
            by_sender.setdefault(copy.src, []).append(copy)
    outgoing = packets_of(by_sender.pop(buffers.rank, ()), SLOT_BYTES, buffers.trailer)
    incoming = {
        peer: (p for p in packets_of(theirs, SLOT_BYTES, buffers.trailer) if buffers.rank in p.dsts)
        for peer, theirs in by_sender.items()
    }
    peers.run(outgoing, incoming, buffers.pack, buffers.unpack, background)


class _Buckets:
    """The copies over the process group: in every round one bucket per pair of workers."""

    def __init__(self, buffers: ExchangeBuffers, activity: ActivityStack, copies: Sequence[P2PCopy]) -> None:
        self.buffers, self.activity = buffers, activity
        pairs: dict[tuple[int, int], list[P2PCopy]] = {}
        for copy in copies:
            pairs.setdefault((copy.src, copy.dst), []).append(copy)
        self.streams = [
            packets_of(batch, BUCKET_BYTES, buffers.trailer, ALONE_BYTES) for _, batch in sorted(pairs.items())
        ]
        self.in_flight: deque[list[_Bucket]] = deque()
        self.buffered = 0
        self.free: list[Tensor] = []

    def start(self) -> None:
        """Post rounds up to ``BUFFER_BYTES``, at least one."""
        while self._post() and self.buffered < BUFFER_BYTES:
            pass

    def finish(self, background: Iterator[object]) -> None:
        """Complete all rounds and post the remaining ones; advance ``background`` before each wait."""
        while self.in_flight:
            next(background, None)
            for bucket in self.in_flight.popleft():
                self._complete(bucket)
            self.start()
        for _ in background:
            pass

    def _post(self) -> bool:
        buckets = [self._bucket(packet) for stream in self.streams if (packet := next(stream, None)) is not None]
        if not buckets:
            return False
        rank = self.buffers.rank
        posts = [(dist.isend, b.data, b.packet.dsts[0]) if b.packet.src == rank else
                 (dist.irecv, b.data, b.packet.src) for b in buckets]  # fmt: skip
        works: list[dist.Work | None] = []
        if dist.get_backend() == "gloo":
            works += [post(data, peer) for post, data, peer in posts]
        else:
            works += dist.batch_isend_irecv([dist.P2POp(*post) for post in posts])
        for number, bucket in enumerate(buckets):
            bucket.work = works[min(number, len(works) - 1)]  # NCCL returns one for the batch
        self.in_flight.append(buckets)
        return True

    def _bucket(self, packet: Packet) -> "_Bucket":
        in_place = self.buffers.in_place(packet)
        if in_place is not None:
            return _Bucket(packet, in_place.view(torch.uint8))
        fitting = next((number for number, free in enumerate(self.free) if free.numel() >= packet.nbytes), None)
        if fitting is not None:
            buffer = self.free.pop(fitting)
        else:
            buffer = torch.empty(packet.nbytes, dtype=torch.uint8, device=self.buffers.device)
        self.buffered += packet.nbytes
        if packet.src == self.buffers.rank:
            self.buffers.pack(packet, buffer)
        return _Bucket(packet, buffer[: packet.nbytes], buffer)

    def _complete(self, bucket: "_Bucket") -> None:
        packet, rank = bucket.packet, self.buffers.rank
        assert bucket.work is not None
        try:
            with self.activity.enter(bucket):
                bucket.work.wait()
        except RuntimeError as error:
            verb = "sending" if packet.src == rank else "awaiting"
            raise RuntimeError(f"rank {rank} failed while {verb} {bucket}: {error}") from error
        if packet.src != rank:
            if bucket.buffer is None:
                self.buffers.mark_received(packet.chunks[0])
            else:
                self.buffers.unpack(packet, bucket.buffer)
        if bucket.buffer is not None:
            self.free.append(bucket.buffer)
            self.buffered -= packet.nbytes


@dataclass
class _Bucket:
    """A packet in flight: its bytes, and the reusable buffer that contains them, if any."""

    packet: Packet
    data: Tensor
    buffer: Tensor | None = None
    work: dist.Work | None = None

    def __str__(self) -> str:
        return f"{self.packet} from rank {self.packet.src} to rank {self.packet.dsts[0]}"
