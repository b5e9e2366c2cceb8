"""Message authentication: a header with channel, sequence number, ranks and a keyed BLAKE2b of header and payload.

The ranks are the sender or, in a message of the master, all receivers: the master signs a message to many workers
once. Sequence numbers increase, which prevents replay; every launch has a new key, so messages of another are rejected.
"""

import os
import secrets
import struct
from array import array
from collections.abc import Iterable
from enum import IntEnum
from hashlib import blake2b
from hmac import compare_digest
from pathlib import Path

HEADER = struct.Struct("<BQI")  # direction, number, count of rank ranges: the count keeps header and payload apart
RANK_RANGE = struct.Struct("<II")  # start <= rank < stop
ONE_RANGE = struct.Struct(HEADER.format + RANK_RANGE.format[1:])
TAG_BYTES = 32


class Direction(IntEnum):
    to_worker = 0
    to_master = 1
    heartbeat = 2


class AuthError(ValueError):
    """A message that is not signed with the key, is not for this receiver, or is replayed."""


def new_key(path: Path) -> bytes:
    """Write a random key of 32 bytes to a new file with mode 0600 and return it."""
    path.unlink(missing_ok=True)
    key = secrets.token_bytes(TAG_BYTES)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(key)
    return key


def message_tag(keyed: "blake2b", fields: bytes, payload: bytes) -> bytes:
    """Return the tag of a message; ``keyed`` is keyed BLAKE2b (RFC 7693) of the empty message."""
    mac = keyed.copy()  # faster than hashing the key again
    mac.update(fields)
    mac.update(payload)
    return mac.digest()


def encode_ranks(ranks: Iterable[int]) -> bytes:
    """Return ranks as sorted ranges."""
    bounds: list[int] = []
    for rank in sorted(ranks):
        if not bounds or rank != bounds[-1]:
            bounds += (rank, rank)
        bounds[-1] = rank + 1
    return struct.pack(f"<{len(bounds)}I", *bounds)


class Signer:
    """Numbers and signs the messages of one direction."""

    def __init__(self, key: bytes, direction: Direction) -> None:
        self._keyed, self._direction, self._number = blake2b(key=key, digest_size=TAG_BYTES), direction, 0

    def sign(self, ranks: Iterable[int], payload: bytes) -> bytes:
        """Return the header of the next message."""
        self._number += 1
        ranges = encode_ranks(ranks)
        fields = HEADER.pack(self._direction, self._number, len(ranges) // RANK_RANGE.size) + ranges
        return message_tag(self._keyed, fields, payload) + fields


class SignatureVerifier:
    """Accepts signed messages of ``directions`` from or for ``ranks``, each once and in order; counts the others."""

    def __init__(self, key: bytes, directions: tuple[Direction, ...], ranks: range) -> None:
        self._keyed, self._ranks, self.rejected = blake2b(key=key, digest_size=TAG_BYTES), ranks, 0
        # by direction: the last number of every rank
        self._last = {int(direction): (direction, array("Q", bytes(8 * len(ranks)))) for direction in directions}

    def accept(self, frames: list[bytes]) -> tuple[Direction, int] | None:
        """Return direction and rank of a message, or None if it is rejected."""
        try:
            if len(frames) == 2:
                return self.check(frames[0], frames[1])
        except AuthError:
            pass
        self.rejected += 1
        return None

    def check(self, header: bytes, payload: bytes) -> tuple[Direction, int]:
        """Return direction and rank of a message; ``AuthError`` if it is invalid."""
        fields = header[TAG_BYTES:]
        if not compare_digest(header[:TAG_BYTES], message_tag(self._keyed, fields, payload)):
            raise AuthError("invalid signature")
        if len(fields) < ONE_RANGE.size:
            raise AuthError(f"a header of {len(header)} bytes")
        code, number, n_ranges, rank, stop = ONE_RANGE.unpack_from(fields)
        if len(fields) != HEADER.size + n_ranges * RANK_RANGE.size:
            raise AuthError(f"a header of {len(header)} bytes for {n_ranges} ranges")
        if n_ranges > 1 or rank not in self._ranks or rank >= stop:
            rank = self._first_own_rank(fields)
        if code not in self._last or rank is None:
            raise AuthError(f"not for this receiver (direction {code})")
        direction, last = self._last[code]
        index = rank - self._ranks.start
        if number <= last[index]:
            raise AuthError(f"message {number} of worker {rank} comes after {last[index]}")
        last[index] = number
        return direction, rank

    def _first_own_rank(self, fields: bytes) -> int | None:
        for start, stop in RANK_RANGE.iter_unpack(fields[HEADER.size :]):
            if start in self._ranks and start < stop:
                return int(start)
            if start < self._ranks.start < stop:
                return self._ranks.start
        return None
