"""Point-to-point exchange of pieces, for rows and for boxes alike, over shared memory where possible, else the network.

Every worker passes the same list of moves. What is decided is decided in plan/; here bytes move.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from realhf.base.activity import ActivityStack
from realhf.comm.packets import ALIGN, Copy, ExchangeBuffers, P2PCopy, Packet, TensorSlice, packets_of, plain_copy
from realhf.comm.relay import scatter_allgather_rounds
from realhf.comm.shared_memory import SLOT_BYTES, SharedMemoryPeers

__all__ = ["ALIGN", "P2PCopy", "TensorSlice", "exchange"]

BUCKET_BYTES = 4 << 20
ALONE_BYTES = 256 << 10
"""Pieces of this size make a bucket of their own: where their memory is in one run, they travel without a copy."""
BUFFER_BYTES = 8 << 20
"""Buckets are put on the wire ahead until those that have to be packed or unpacked take this: little stays in cache."""
STREAMED_BYTES = 16 << 20
"""Where more than this arrives, it goes past the caches: it would only push other things out, itself at last."""


@torch.no_grad()
def exchange(
    moves: Sequence[P2PCopy],
    rank: int,
    read: Callable[[object], Tensor],
    write: Callable[[object, Tensor], None],
    device: torch.device,
    *,
    into: Callable[[object], Tensor] | None = None,
    links: SharedMemoryPeers | None = None,
    verify: bool = False,
    copy: Copy = plain_copy,
    activity: ActivityStack | None = None,
) -> int:
    """Carry out the moves that this worker has a part in; return the bytes it received from others.

    ``read(what)`` gives the elements to send (any shape), ``write(what, flat)`` takes and may keep them. Where ``into``
    is given, ``into(what)`` is the place for them (any shape and strides) and ``write`` is not used, which saves a copy
    and large temporary memory; receivers that share no memory with a sender then relay what several of them get from it
    (``relay.in_rounds`` says who must be given which moves). All may be called several times. A move to itself is a
    plain copy. ``copy`` does all copies.

    Workers in ``links`` are served through shared memory, the others by the default process group; each wait has the
    deadline of its wire, and is on ``activity``. With ``verify`` all that arrives is compared by checksum; RuntimeError
    names what differs.
    """
    activity = activity or ActivityStack()
    arriving = sum(move.piece.nbytes for move in moves if move.dst == rank)
    ends = ExchangeBuffers(rank, read, write, into, device, verify, copy, arriving > STREAMED_BYTES, arriving)
    stays = (
        done for m in moves if m.dst == rank and (m.src == rank or not m.piece.numel) for done in _copy_local(m, ends)
    )
    near = links.peers if links else frozenset()
    with activity.enter(ends):
        for turn in scatter_allgather_rounds(moves, links.hosts if links else {}) if into is not None else (moves,):
            mine = [move for move in turn if rank in (move.src, move.dst) and move.src != move.dst and move.piece.numel]
            far = _Buckets(ends, activity, [move for move in mine if not near.intersection((move.src, move.dst))])
            far.start()
            if links is not None and near:
                _via_shared_memory(turn, links, ends, stays)
            far.finish(stays)
    return ends.received


def _copy_local(move: P2PCopy, ends: ExchangeBuffers) -> Iterator[bool]:
    """Carry out a move that needs no wire, a while at a time."""
    piece = move.piece
    values = ends.read(move.what) if move.src == ends.rank else torch.empty(0, dtype=piece.dtype, device=ends.device)
    if ends.into is None:
        ends.write(move.what, values.reshape(-1))
        yield True
    elif piece.numel:
        place = ends.into(move.what)
        values = values.view(place.shape)
        rows = max(1, SLOT_BYTES * len(place) // piece.nbytes)
        for first in range(0, len(place), rows):
            value = values[first : first + rows]
            ends.copy(place[first : first + rows], value, ends.streaming and value.is_contiguous())
            yield True


def _via_shared_memory(
    moves: Iterable[P2PCopy], links: SharedMemoryPeers, ends: ExchangeBuffers, meanwhile: Iterator[bool]
) -> None:
    """Carry out what moves between this worker and those it shares memory with."""
    leaving: list[P2PCopy] = []
    coming: dict[int, list[P2PCopy]] = {}
    for move in moves:
        if move.src == move.dst or not move.piece.numel:
            continue
        if move.src == ends.rank:
            if move.dst in links.peers:
                leaving.append(move)
        elif move.src in links.peers and (move.dst == ends.rank or move.dst in links.peers):
            coming.setdefault(move.src, []).append(move)
    incoming = {
        peer: (p for p in packets_of(theirs, SLOT_BYTES, ends.trailer) if ends.rank in p.to)
        for peer, theirs in coming.items()
    }
    links.run(packets_of(leaving, SLOT_BYTES, ends.trailer), incoming, ends.pack, ends.unpack, meanwhile)


class _Buckets:
    """The moves between this worker and others over the process group, one bucket per pair of workers and round."""

    def __init__(self, ends: ExchangeBuffers, activity: ActivityStack, moves: Sequence[P2PCopy]) -> None:
        self.ends, self.activity = ends, activity
        pairs: dict[tuple[int, int], list[P2PCopy]] = {}
        for move in moves:
            pairs.setdefault((move.src, move.dst), []).append(move)
        self.lanes = [packets_of(batch, BUCKET_BYTES, ends.trailer, ALONE_BYTES) for _, batch in sorted(pairs.items())]
        self.under_way: deque[list[_Bucket]] = deque()
        self.buffered = 0
        self.spare: list[Tensor] = []

    def start(self) -> None:
        """Put the next buckets on the wire, one round at least."""
        while self._post() and self.buffered < BUFFER_BYTES:
            pass

    def finish(self, meanwhile: Iterator[object]) -> None:
        """Bring in everything, and send on as places become free; take one of ``meanwhile`` before each wait."""
        while self.under_way:
            next(meanwhile, None)
            for bucket in self.under_way.popleft():
                self._complete(bucket)
            self.start()
        for _ in meanwhile:
            pass

    def _post(self) -> bool:
        buckets = [self._bucket(parcel) for lane in self.lanes if (parcel := next(lane, None)) is not None]
        if not buckets:
            return False
        rank = self.ends.rank
        posts = [(dist.isend, b.wire, b.parcel.to[0]) if b.parcel.src == rank else (dist.irecv, b.wire, b.parcel.src)
                 for b in buckets]  # fmt: skip
        works: list[dist.Work | None] = []
        if self.ends.device.type == "cpu":
            works += [post(wire, peer) for post, wire, peer in posts]
        else:
            works += dist.batch_isend_irecv([dist.P2POp(*post) for post in posts])
        for number, bucket in enumerate(buckets):
            bucket.work = works[min(number, len(works) - 1)]  # NCCL has one for all
        self.under_way.append(buckets)
        return True

    def _bucket(self, parcel: Packet) -> "_Bucket":
        in_place = self.ends.in_place(parcel)
        if in_place is not None:
            return _Bucket(parcel, in_place.view(torch.uint8))
        fitting = [number for number, spare in enumerate(self.spare) if spare.numel() >= parcel.nbytes]
        whole = self.spare.pop(fitting[0]) if fitting else None
        if whole is None:
            whole = torch.empty(parcel.nbytes, dtype=torch.uint8, device=self.ends.device)
        self.buffered += parcel.nbytes
        if parcel.src == self.ends.rank:
            self.ends.pack(parcel, whole)
        return _Bucket(parcel, whole[: parcel.nbytes], whole)

    def _complete(self, bucket: "_Bucket") -> None:
        parcel, rank = bucket.parcel, self.ends.rank
        assert bucket.work is not None
        try:
            with self.activity.enter(bucket):
                bucket.work.wait()
        except RuntimeError as error:
            way = "sending" if parcel.src == rank else "awaiting"
            raise RuntimeError(f"rank {rank} failed while {way} {bucket}: {error}") from error
        if parcel.src != rank and bucket.whole is None:
            self.ends.arrived(parcel.parts[0])
        elif parcel.src != rank and bucket.whole is not None:
            self.ends.unpack(parcel, bucket.whole)
        if bucket.whole is not None:
            self.spare.append(bucket.whole)
            self.buffered -= parcel.nbytes


@dataclass
class _Bucket:
    """A parcel on the wire: the bytes there, and the memory to be used again that they lie in, if any."""

    parcel: Packet
    wire: Tensor
    whole: Tensor | None = None
    work: dist.Work | None = None

    def __str__(self) -> str:
        return f"{self.parcel} from rank {self.parcel.src} to rank {self.parcel.to[0]}"
