"""Packs tensor slices of point-to-point copies into packets of bounded size; every rank computes the same packets."""

import sys
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain, pairwise, zip_longest
from typing import Any

import torch
from torch import Tensor

ALIGN = 16
"""Slices start at multiples of this many bytes, so that any element type can be viewed in place."""

N_WEIGHTS = 1 << 16
MIN_RELAY_BYTES = 1 << 18
"""Bytes per receiver below which a second round costs more than it saves."""

Copy = Callable[[Tensor, Tensor, bool], None]
"""Copies the second tensor to the first, of equal shape and any strides; the flag asks for non-temporal stores."""


def plain_copy(target: Tensor, source: Tensor, streaming: bool) -> None:
    target.copy_(source)


@dataclass(frozen=True)
class TensorSlice:
    """Element type and number of elements of one copy."""

    dtype: torch.dtype
    numel: int

    @property
    def nbytes(self) -> int:
        return aligned_size(self.numel * self.dtype.itemsize)


@dataclass(frozen=True)
class P2PCopy:
    """A copy of the object ``what`` (a row, a box), or of its elements from ``start`` on, from ``src`` to ``dst``.

    Copies of one sender with an equal ``dedup_key`` that is not None have the same elements and different receivers:
    shared memory holds them once. A relaying sender reads the elements from where it received ``relay_source``.
    """

    what: object
    src: int
    dst: int
    tensor_slice: TensorSlice
    dedup_key: Hashable = None
    start: int = 0
    relay_source: object = None


@dataclass(frozen=True)
class Chunk:
    """Elements ``start`` to ``stop`` of one slice, at byte ``offset`` of a packet, for each of ``copies``."""

    copies: tuple[P2PCopy, ...]
    start: int
    stop: int
    offset: int
    nbytes: int

    @property
    def dtype(self) -> torch.dtype:
        return self.copies[0].tensor_slice.dtype


@dataclass(frozen=True)
class Packet:
    """One message from ``src`` to all of ``dsts``."""

    src: int
    dsts: tuple[int, ...]
    chunks: tuple[Chunk, ...]
    nbytes: int

    def __str__(self) -> str:
        first = self.chunks[0]
        more = f" and {len(self.chunks) - 1} more" if len(self.chunks) > 1 else ""
        return f"{first.copies[0].what} (elements {first.start} to {first.stop - 1}){more}"


def aligned_size(nbytes: int) -> int:
    return -(-nbytes // ALIGN) * ALIGN


def relayed(
    copies: Iterable[P2PCopy], hosts: Mapping[int, Hashable], min_bytes: int = MIN_RELAY_BYTES
) -> tuple[list[P2PCopy], list[P2PCopy]]:
    """Turn broadcasts to remote receivers into a scatter followed by an all-gather among the receivers.

    Return equivalent copies in two rounds; a rank starts the second round when it has completed its first. The sender
    sends every byte once, for any number of receivers, and the broadcast takes as long as two sends.

    Ranks that ``hosts`` maps to the same value share memory; ranks missing from it share none. A rank that takes part
    in a copy must pass all copies of that sender with an equal ``dedup_key``.
    """
    first: list[P2PCopy] = []
    second: list[P2PCopy] = []
    remote: dict[Hashable, list[P2PCopy]] = {}
    for copy in copies:
        if copy.dedup_key is None or copy.src == copy.dst or _host(copy.src, hosts) == _host(copy.dst, hosts):
            first.append(copy)
        else:
            remote.setdefault((copy.src, copy.dedup_key), []).append(copy)
    for broadcast in remote.values():
        for receivers in _receiver_groups(broadcast, hosts):
            if len(receivers) == 1 or receivers[0].tensor_slice.nbytes < min_bytes * len(receivers):
                first += receivers
            else:
                for scatter, gathers in _scatter_allgather(receivers):
                    first.append(scatter)
                    second += gathers
    return first, second


def _host(rank: int, hosts: Mapping[int, Hashable]) -> Hashable:
    return hosts.get(rank, (rank,))


def _receiver_groups(broadcast: Iterable[P2PCopy], hosts: Mapping[int, Hashable]) -> list[list[P2PCopy]]:
    """Group receivers by host; receivers without others on their host form one group together."""
    groups: dict[Hashable, list[P2PCopy]] = {}
    for copy in broadcast:
        groups.setdefault(_host(copy.dst, hosts), []).append(copy)
    single = [group[0] for group in groups.values() if len(group) == 1]
    return [group for group in groups.values() if len(group) > 1] + ([single] if single else [])


def _scatter_allgather(receivers: list[P2PCopy]) -> Iterator[tuple[P2PCopy, list[P2PCopy]]]:
    """Yield each receiver's share, and the copies of that share to the other receivers."""
    numel, dtype = receivers[0].tensor_slice.numel, receivers[0].tensor_slice.dtype
    bounds = [numel * i // len(receivers) // ALIGN * ALIGN for i in range(len(receivers))]  # aligned for any dtype
    for own, (start, stop) in zip(receivers, pairwise([*bounds, numel]), strict=True):
        scatter = replace(own, tensor_slice=TensorSlice(dtype, stop - start), dedup_key=None, start=start)
        key = (own.src, own.dedup_key, start)
        gather = replace(scatter, src=own.dst, dedup_key=key, relay_source=own.what)
        yield scatter, [replace(gather, what=other.what, dst=other.dst) for other in receivers if other is not own]


def packets_of(copies: Iterable[P2PCopy], limit: int, trailer: int = 0, alone: int = sys.maxsize) -> Iterator[Packet]:
    """Pack the copies of one sender into packets of at most ``limit`` bytes, round robin over sets of receivers.

    ``trailer`` bytes follow every chunk. A slice that does not fit into the rest of a packet starts a new packet; only
    a slice larger than a packet is split. Slices of ``alone`` bytes or more share no packet.
    """
    by_content: dict[Hashable, list[P2PCopy]] = {}
    for number, copy in enumerate(copies):
        key = (copy.dedup_key is None, number if copy.dedup_key is None else copy.dedup_key)
        by_content.setdefault(key, []).append(copy)
    streams: dict[tuple[int, ...], list[tuple[P2PCopy, ...]]] = {}
    for same in by_content.values():
        streams.setdefault(tuple(sorted({copy.dst for copy in same})), []).append(tuple(same))
    rounds = zip_longest(*(_packet_stream(dsts, contents, limit, trailer, alone) for dsts, contents in streams.items()))
    return (packet for packet in chain.from_iterable(rounds) if packet is not None)


def _packet_stream(
    dsts: tuple[int, ...], contents: Iterable[tuple[P2PCopy, ...]], limit: int, trailer: int, alone: int
) -> Iterator[Packet]:
    chunks: list[Chunk] = []
    offset, src = 0, 0
    for same in contents:
        slice_, start, src = same[0].tensor_slice, 0, same[0].src
        itemsize = slice_.dtype.itemsize
        max_numel = (limit - trailer) // ALIGN * ALIGN // itemsize
        capacity = limit if slice_.nbytes < alone else 0
        while start < slice_.numel:
            stop = min(slice_.numel, start + max_numel)
            size = aligned_size((stop - start) * itemsize) + trailer
            if chunks and offset + size > capacity:
                yield Packet(src, dsts, tuple(chunks), offset)
                chunks, offset = [], 0
            chunks.append(Chunk(same, start, stop, offset, (stop - start) * itemsize))
            offset += size
            start = stop
        if chunks and not capacity:
            yield Packet(src, dsts, tuple(chunks), offset)
            chunks, offset = [], 0
    if chunks:
        yield Packet(src, dsts, tuple(chunks), offset)


def strided_views(tensor: Tensor, start: int, stop: int) -> list[Tensor]:
    """Return views that together hold elements ``start`` to ``stop`` of a tensor with any strides, in order."""
    if tensor.is_contiguous():
        return [tensor.view(-1)[start:stop]]
    inner = tensor.numel() // tensor.shape[0]
    first, last = -(-start // inner), stop // inner
    if first > last:
        return strided_views(tensor[last], start - last * inner, stop - last * inner)
    views = strided_views(tensor[first - 1], start - (first - 1) * inner, inner) if start < first * inner else []
    if first < last:
        views.append(tensor[first:last])
    return views + (strided_views(tensor[last], 0, stop - last * inner) if last * inner < stop else [])


def checksum(views: Sequence[Tensor], dtype: torch.dtype, weights: Tensor) -> Tensor:
    """Return ``[1] int64``: a weighted sum, modulo 2^64, of the 8-byte words of the elements cast to ``dtype``.

    ``weights``, ``[W] int64``, suffice for ``W * (W - 1)`` words. They are odd, so that every change of a single word
    is detected, and random, so that almost every other change is.
    """
    flat = torch.cat([view.reshape(-1) for view in views]) if len(views) > 1 else views[0].reshape(-1)
    flat = flat.to(dtype)
    if flat.numel() * dtype.itemsize % 8 or flat.storage_offset() * dtype.itemsize % 8:
        flat = torch.nn.functional.pad(flat, (0, -flat.numel() % (8 // min(8, dtype.itemsize))))
    words = flat.view(torch.int64)
    n_full = words.numel() // len(weights) * len(weights)
    sums = (words[:n_full].view(-1, len(weights)) * weights).sum(1)
    rest = (words[n_full:] * weights[: words.numel() - n_full]).sum(0, keepdim=True)
    return (torch.cat([rest, sums]) * weights[: len(sums) + 1]).sum(0, keepdim=True)


@dataclass
class ExchangeBuffers:
    """The source and target tensors of this rank's copies: ``read``, ``write`` and ``into`` of ``exchange``."""

    rank: int
    read: Callable[[Any], Tensor]
    write: Callable[[Any, Tensor], None]
    into: Callable[[Any], Tensor] | None
    device: torch.device
    verify: bool = False
    copy: Copy = plain_copy
    streaming: bool = False
    expected: int = 0
    received: int = 0
    _incomplete: dict[int, Tensor] = field(default_factory=dict)
    _cached: tuple[object, object, Tensor] | None = None

    def __str__(self) -> str:
        return f"an exchange with {self.received} of {self.expected} bytes received"

    @property
    def trailer(self) -> int:
        return ALIGN if self.verify else 0

    @cached_property
    def weights(self) -> Tensor:
        """``[N_WEIGHTS] int64``, the same on every rank: the weights of ``checksum``."""
        generator = torch.Generator().manual_seed(0)
        return (torch.randint(-(1 << 63), (1 << 63) - 1, (N_WEIGHTS,), generator=generator) | 1).to(self.device)

    def source(self, chunk: Chunk) -> list[Tensor]:
        copy = chunk.copies[0]
        if copy.relay_source is None:
            values = self._lookup(self.read, copy.what)
        else:
            assert self.into is not None, "relays need target tensors"
            values = self._lookup(self.into, copy.relay_source)
        return strided_views(values, copy.start + chunk.start, copy.start + chunk.stop)

    def target(self, chunk: Chunk) -> list[Tensor]:
        copy = self._own_copy(chunk)
        if self.into is not None:
            return strided_views(self._lookup(self.into, copy.what), copy.start + chunk.start, copy.start + chunk.stop)
        if chunk.start == 0:
            self._incomplete[id(copy)] = torch.empty(copy.tensor_slice.numel, dtype=chunk.dtype, device=self.device)
        return [self._incomplete[id(copy)][chunk.start : chunk.stop]]

    def _lookup(self, find: Callable[[Any], Tensor], what: object) -> Tensor:
        """Cache the last tensor: a large slice has many chunks, and each looks it up twice."""
        if self._cached is None or self._cached[0] is not what or self._cached[1] is not find:
            self._cached = what, find, find(what)
        return self._cached[2]

    def in_place(self, packet: Packet) -> Tensor | None:
        """Return the contiguous source or target with exactly the packet's bytes, or None if a buffer is needed."""
        chunk = packet.chunks[0]
        if self.verify or len(packet.chunks) > 1 or chunk.nbytes != packet.nbytes:
            return None
        views = self.source(chunk) if packet.src == self.rank else self.target(chunk)
        fits = len(views) == 1 and views[0].is_contiguous() and views[0].dtype == chunk.dtype
        return views[0].view(-1) if fits and views[0].device == self.device else None

    def mark_received(self, chunk: Chunk) -> None:
        """Count a chunk whose target is filled; pass a complete slice to ``write``."""
        copy = self._own_copy(chunk)
        self.received += aligned_size(chunk.nbytes)
        if self.into is None and chunk.stop == copy.tensor_slice.numel:
            self.write(copy.what, self._incomplete.pop(id(copy)))

    def pack(self, packet: Packet, buffer: Tensor) -> None:
        """Fill ``buffer``, ``[>= packet.nbytes] uint8``."""
        for chunk in packet.chunks:
            views = self.source(chunk)
            for view, packed in _zip_flat(views, _typed(buffer, chunk)):
                self.copy(packed, view, False)
            if self.verify:
                _trailer(buffer, chunk).copy_(checksum(views, chunk.dtype, self.weights))

    def unpack(self, packet: Packet, buffer: Tensor) -> None:
        """Copy ``buffer`` to the targets; RuntimeError if a checksum differs from the sender's."""
        for chunk in packet.chunks:
            views = self.target(chunk)
            for view, packed in _zip_flat(views, _typed(buffer, chunk)):
                self.copy(view, packed, self.streaming)
            if self.verify and not torch.equal(checksum(views, chunk.dtype, self.weights), _trailer(buffer, chunk)):
                copy = self._own_copy(chunk)
                raise RuntimeError(
                    f"{copy.what} was corrupted between rank {packet.src} and rank {self.rank}: the checksum of "
                    f"elements {copy.start + chunk.start} to {copy.start + chunk.stop - 1} differs"
                )
            self.mark_received(chunk)

    def _own_copy(self, chunk: Chunk) -> P2PCopy:
        return next(copy for copy in chunk.copies if copy.dst == self.rank)


def _typed(buffer: Tensor, chunk: Chunk) -> Tensor:
    return buffer[chunk.offset : chunk.offset + chunk.nbytes].view(chunk.dtype)


def _trailer(buffer: Tensor, chunk: Chunk) -> Tensor:
    end = chunk.offset + aligned_size(chunk.nbytes)
    return buffer[end : end + 8].view(torch.int64)


def _zip_flat(views: Sequence[Tensor], flat: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    start = 0
    for view in views:
        yield view, flat[start : start + view.numel()].view(view.shape)
        start += view.numel()
