"""Point-to-point exchange of pieces, for rows and for boxes alike: pack per peer, send and receive all at once, unpack.

Every worker passes the same list of moves. What is decided is decided in plan/; here bytes move.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

ALIGN = 16
"""Pieces start at multiples of this many bytes, so that any element type can be viewed in place."""


@dataclass(frozen=True)
class Piece:
    """What a move carries: element type and number of elements."""

    dtype: torch.dtype
    numel: int

    @property
    def nbytes(self) -> int:
        return -(-self.numel * self.dtype.itemsize // ALIGN) * ALIGN


@dataclass(frozen=True)
class Move:
    """A thing ``what`` (a row, a box) on its way."""

    what: object
    src: int
    dst: int
    piece: Piece


def exchange(
    moves: Sequence[Move],
    rank: int,
    read: Callable[[object], Tensor],
    write: Callable[[object, Tensor], None],
    device: torch.device,
) -> int:
    """Carry out the moves that this worker has a part in; return the bytes it received from others.

    ``read(what)`` gives the elements to send (any shape), ``write(what, flat)`` takes them. A move to itself is a
    plain copy. The default group's deadline bounds the wait.
    """
    outgoing: dict[int, list[Move]] = {}
    incoming: dict[int, list[Move]] = {}
    for move in moves:
        if move.src == rank and move.dst == rank:
            write(move.what, read(move.what).reshape(-1))
        elif move.src == rank:
            outgoing.setdefault(move.dst, []).append(move)
        elif move.dst == rank:
            incoming.setdefault(move.src, []).append(move)
    landing = {peer: torch.empty(_nbytes(batch), dtype=torch.uint8, device=device) for peer, batch in incoming.items()}
    operations = [dist.P2POp(dist.irecv, buffer, peer) for peer, buffer in landing.items()]
    operations += [dist.P2POp(dist.isend, _pack(batch, read, device), peer) for peer, batch in outgoing.items()]
    if operations:
        for request in dist.batch_isend_irecv(operations):
            request.wait()
    for peer, batch in incoming.items():
        _unpack(batch, landing[peer], write)
    return sum(buffer.numel() for buffer in landing.values())


def _nbytes(batch: Sequence[Move]) -> int:
    return sum(move.piece.nbytes for move in batch)


def _pack(batch: Sequence[Move], read: Callable[[object], Tensor], device: torch.device) -> Tensor:
    buffer = torch.empty(_nbytes(batch), dtype=torch.uint8, device=device)
    for move, place in _places(batch, buffer):
        place.copy_(read(move.what).reshape(-1))
    return buffer


def _unpack(batch: Sequence[Move], buffer: Tensor, write: Callable[[object, Tensor], None]) -> None:
    for move, place in _places(batch, buffer):
        write(move.what, place)


def _places(batch: Sequence[Move], buffer: Tensor) -> list[tuple[Move, Tensor]]:
    """Return, for each move, the typed view of its bytes."""
    places, start = [], 0
    for move in batch:
        piece = move.piece
        used = piece.numel * piece.dtype.itemsize
        places.append((move, buffer[start : start + used].view(piece.dtype)))
        start += piece.nbytes
    return places
