"""What travels together: pieces cut and packed into parcels of bounded size, the same on every rank.

Pure but for ``Ends``, which copies between parcels and tensors. How a parcel travels is not decided here.
"""

import sys
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, zip_longest

import torch
from torch import Tensor

ALIGN = 16
"""Pieces start at multiples of this many bytes, so that any element type can be viewed in place."""

N_WEIGHTS = 1 << 16

Copy = Callable[[Tensor, Tensor, bool], None]
"""Copies the second tensor over the first, of the same shape and any strides; past the caches, if the third says so."""


def plain_copy(target: Tensor, source: Tensor, streaming: bool) -> None:
    target.copy_(source)


@dataclass(frozen=True)
class TensorSlice:
    """What a move carries: element type and number of elements."""

    dtype: torch.dtype
    numel: int

    @property
    def nbytes(self) -> int:
        return aligned_size(self.numel * self.dtype.itemsize)


@dataclass(frozen=True)
class P2PCopy:
    """A thing ``what`` (a row, a box) on its way, or its elements from ``start`` on.

    Moves of one sender with an equal ``content`` that is not None carry the same elements to several workers: where the
    wire allows, they are written once. A sender that received them itself holds them as ``held_as``.
    """

    what: object
    src: int
    dst: int
    piece: TensorSlice
    dedup_key: Hashable = None
    start: int = 0
    relay_source: object = None


@dataclass(frozen=True)
class Chunk:
    """Elements ``start`` to ``stop`` of one piece, at byte ``at`` of a parcel, for each of ``moves``."""

    moves: tuple[P2PCopy, ...]
    start: int
    stop: int
    at: int
    nbytes: int

    @property
    def dtype(self) -> torch.dtype:
        return self.moves[0].piece.dtype


@dataclass(frozen=True)
class Packet:
    """Bytes that leave ``src`` at once, for all of ``to``."""

    src: int
    to: tuple[int, ...]
    parts: tuple[Chunk, ...]
    nbytes: int

    def __str__(self) -> str:
        first = self.parts[0]
        more = f" and {len(self.parts) - 1} more" if len(self.parts) > 1 else ""
        return f"{first.moves[0].what} (elements {first.start} to {first.stop - 1}){more}"


def aligned_size(nbytes: int) -> int:
    return -(-nbytes // ALIGN) * ALIGN


def packets_of(moves: Iterable[P2PCopy], limit: int, trailer: int = 0, alone: int = sys.maxsize) -> Iterator[Packet]:
    """Pack the moves of one sender into parcels of at most ``limit`` bytes, by turns for each set of receivers.

    Every part leaves ``trailer`` bytes free behind it. A piece that does not fit into what is left of a parcel starts
    a new one; only a piece larger than a parcel is cut. Pieces of ``alone`` bytes or more share no parcel.
    """
    same: dict[Hashable, list[P2PCopy]] = {}
    for number, move in enumerate(moves):
        same.setdefault((move.dedup_key is None, number if move.dedup_key is None else move.dedup_key), []).append(move)
    lanes: dict[tuple[int, ...], list[tuple[P2PCopy, ...]]] = {}
    for alike in same.values():
        lanes.setdefault(tuple(sorted({move.dst for move in alike})), []).append(tuple(alike))
    turns = zip_longest(*(_packets_to(to, contents, limit, trailer, alone) for to, contents in lanes.items()))
    return (parcel for parcel in chain.from_iterable(turns) if parcel is not None)


def _packets_to(
    to: tuple[int, ...], contents: Iterable[tuple[P2PCopy, ...]], limit: int, trailer: int, alone: int
) -> Iterator[Packet]:
    parts: list[Chunk] = []
    at, src = 0, 0
    for alike in contents:
        piece, start, src = alike[0].piece, 0, alike[0].src
        itemsize = piece.dtype.itemsize
        most = (limit - trailer) // ALIGN * ALIGN // itemsize
        room = limit if piece.nbytes < alone else 0
        while start < piece.numel:
            stop = min(piece.numel, start + most)
            size = aligned_size((stop - start) * itemsize) + trailer
            if parts and at + size > room:
                yield Packet(src, to, tuple(parts), at)
                parts, at = [], 0
            parts.append(Chunk(alike, start, stop, at, (stop - start) * itemsize))
            at += size
            start = stop
        if parts and not room:
            yield Packet(src, to, tuple(parts), at)
            parts, at = [], 0
    if parts:
        yield Packet(src, to, tuple(parts), at)


def strided_views(tensor: Tensor, start: int, stop: int) -> list[Tensor]:
    """Return views that together are elements ``start`` to ``stop`` of a tensor of any strides, in order."""
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
    """Return ``[1] int64``: the 8-byte words of the elements, as ``dtype``, in blocks, weighted and added up.

    Wraps at 64 bits. The weights, ``[W] int64``, suffice for ``W * (W - 1)`` words: odd, so that no change of a
    single word goes unnoticed; random, so that hardly any other change does.
    """
    flat = torch.cat([view.reshape(-1) for view in views]) if len(views) > 1 else views[0].reshape(-1)
    flat = flat.to(dtype)
    if flat.numel() * dtype.itemsize % 8 or flat.storage_offset() * dtype.itemsize % 8:
        flat = torch.nn.functional.pad(flat, (0, -flat.numel() % (8 // min(8, dtype.itemsize))))
    words = flat.view(torch.int64)
    whole = words.numel() // len(weights) * len(weights)
    sums = (words[:whole].view(-1, len(weights)) * weights).sum(1)
    rest = (words[whole:] * weights[: words.numel() - whole]).sum(0, keepdim=True)
    return (torch.cat([rest, sums]) * weights[: len(sums) + 1]).sum(0, keepdim=True)


@dataclass
class ExchangeBuffers:
    """Where this rank's pieces come from and go to: ``read``, ``write`` and ``into`` of ``exchange``."""

    rank: int
    read: Callable[[object], Tensor]
    write: Callable[[object, Tensor], None]
    into: Callable[[object], Tensor] | None
    device: torch.device
    verify: bool = False
    copy: Copy = plain_copy
    streaming: bool = False
    arriving: int = 0
    received: int = 0
    _unfinished: dict[int, Tensor] = field(default_factory=dict)
    _last: tuple[object, object, Tensor] | None = None

    def __str__(self) -> str:
        return f"an exchange with {self.received} of {self.arriving} bytes here"

    @property
    def trailer(self) -> int:
        return ALIGN if self.verify else 0

    @cached_property
    def weights(self) -> Tensor:
        """``[N_WEIGHTS] int64``, the same on every rank: the weights of ``checksum``."""
        generator = torch.Generator().manual_seed(0)
        return (torch.randint(-(1 << 63), (1 << 63) - 1, (N_WEIGHTS,), generator=generator) | 1).to(self.device)

    def source(self, part: Chunk) -> list[Tensor]:
        """Return the views a part is read from."""
        move = part.moves[0]
        if move.relay_source is None:
            values = self._at_hand(self.read, move.what)
        else:
            assert self.into is not None, "what is relayed has a place"
            values = self._at_hand(self.into, move.relay_source)
        return strided_views(values, move.start + part.start, move.start + part.stop)

    def target(self, part: Chunk) -> list[Tensor]:
        """Return the views a part is written to."""
        move = self._mine(part)
        if self.into is not None:
            return strided_views(self._at_hand(self.into, move.what), move.start + part.start, move.start + part.stop)
        if part.start == 0:
            self._unfinished[id(move)] = torch.empty(move.piece.numel, dtype=part.dtype, device=self.device)
        return [self._unfinished[id(move)][part.start : part.stop]]

    def _at_hand(self, find: Callable[[object], Tensor], what: object) -> Tensor:
        """Return what was asked for last without asking again: a large piece is many parts, looked at twice each."""
        if self._last is None or self._last[0] is not what or self._last[1] is not find:
            self._last = what, find, find(what)
        return self._last[2]

    def in_place(self, parcel: Packet) -> Tensor | None:
        """Return the one tensor that is the parcel's content byte by byte, at the sender or the receiver, if any."""
        part = parcel.parts[0]
        if self.verify or len(parcel.parts) > 1 or part.nbytes != parcel.nbytes:
            return None
        views = self.source(part) if parcel.src == self.rank else self.target(part)
        fits = len(views) == 1 and views[0].is_contiguous() and views[0].dtype == part.dtype
        return views[0].view(-1) if fits and views[0].device == self.device else None

    def arrived(self, part: Chunk) -> None:
        """Take note that the views of ``target`` are filled; a piece that is whole goes to ``write``."""
        move = self._mine(part)
        self.received += aligned_size(part.nbytes)
        if self.into is None and part.stop == move.piece.numel:
            self.write(move.what, self._unfinished.pop(id(move)))

    def pack(self, parcel: Packet, buffer: Tensor) -> None:
        """Fill ``buffer``, ``[>= parcel.nbytes] uint8``."""
        for part in parcel.parts:
            views = self.source(part)
            for view, packed in _side_by_side(views, _typed(buffer, part)):
                self.copy(packed, view, False)
            if self.verify:
                _trailer(buffer, part).copy_(checksum(views, part.dtype, self.weights))

    def unpack(self, parcel: Packet, buffer: Tensor) -> None:
        """Empty ``buffer`` into its places; RuntimeError when a part is not there as it was at the sender."""
        for part in parcel.parts:
            views = self.target(part)
            for view, packed in _side_by_side(views, _typed(buffer, part)):
                self.copy(view, packed, self.streaming)
            if self.verify and not torch.equal(checksum(views, part.dtype, self.weights), _trailer(buffer, part)):
                move = self._mine(part)
                raise RuntimeError(
                    f"{move.what} was damaged on its way from rank {parcel.src} to rank {self.rank}: the checksum of "
                    f"elements {move.start + part.start} to {move.start + part.stop - 1} differs"
                )
            self.arrived(part)

    def _mine(self, part: Chunk) -> P2PCopy:
        return next(move for move in part.moves if move.dst == self.rank)


def _typed(buffer: Tensor, part: Chunk) -> Tensor:
    return buffer[part.at : part.at + part.nbytes].view(part.dtype)


def _trailer(buffer: Tensor, part: Chunk) -> Tensor:
    end = part.at + aligned_size(part.nbytes)
    return buffer[end : end + 8].view(torch.int64)


def _side_by_side(views: Sequence[Tensor], flat: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    start = 0
    for view in views:
        yield view, flat[start : start + view.numel()].view(view.shape)
        start += view.numel()
