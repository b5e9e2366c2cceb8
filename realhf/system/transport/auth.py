"""Messages that prove who sent them: before a payload stand lane, number, ranks, and a keyed BLAKE2b of it all.

The ranks are whom it is from or, from the master, everyone it is for: it says the same to many under one seal. Numbers
only grow in a lane, so that a recorded message is not heard again; the key is made for one launch, so that those of
another are not heard at all.
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

FIELDS = struct.Struct("<BQI")  # lane, number, how many runs follow: so no byte may pass from them to the payload
RUN = struct.Struct("<II")  # ranks, start <= rank < stop
ONE_RUN = struct.Struct(FIELDS.format + RUN.format[1:])
TAG_BYTES = 32


class Direction(IntEnum):
    to_worker = 0
    to_master = 1
    beat = 2


class AuthError(ValueError):
    """A message that nobody with the key has sent, or that was heard before."""


def new_key(path: Path) -> bytes:
    """Write a key of 32 bytes to a file that only its owner may read, in place of any that is there; return it."""
    path.unlink(missing_ok=True)
    key = secrets.token_bytes(TAG_BYTES)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(key)
    return key


def keyed_hash(key: bytes) -> "blake2b":
    """Return the message authentication code of nothing yet (RFC 7693, keyed), for copies to go on from."""
    return blake2b(key=key, digest_size=TAG_BYTES)


def runs_of(ranks: Iterable[int]) -> bytes:
    """Return ranks as runs, in order."""
    bounds: list[int] = []
    stop = None
    for rank in sorted(ranks):
        if rank != stop:
            bounds += (rank,) if stop is None else (stop, rank)
        stop = rank + 1
    if stop is not None:
        bounds.append(stop)
    return struct.pack(f"<{len(bounds)}I", *bounds)


class Signer:
    """Numbers and signs what goes out in one lane, of one worker or to many."""

    def __init__(self, key: bytes, lane: Direction) -> None:
        self._mac, self._lane, self._number = keyed_hash(key), lane, 0

    def head(self, ranks: Iterable[int], payload: bytes) -> bytes:
        """Return what is sent before the payload."""
        self._number += 1
        runs = runs_of(ranks)
        fields = FIELDS.pack(self._lane, self._number, len(runs) // RUN.size) + runs
        mac = self._mac.copy()
        mac.update(fields)
        mac.update(payload)
        return mac.digest() + fields


class SignatureVerifier:
    """Lets through what was sealed for one of ``lanes`` of one of ``ranks``, in order and once."""

    def __init__(self, key: bytes, lanes: tuple[Direction, ...], ranks: range) -> None:
        self._mac, self._ranks = keyed_hash(key), ranks
        self._heard = {
            int(lane): (lane, array("Q", bytes(8 * len(ranks)))) for lane in lanes
        }  # last number of every rank

    def check(self, head: bytes, payload: bytes) -> tuple[Direction, int]:
        """Return lane and rank of a message; ``Refused`` says what is wrong with it.

        A master of thousands of workers does this thousands of times a second.
        """
        fields = head[TAG_BYTES:]
        mac = self._mac.copy()
        mac.update(fields)
        mac.update(payload)
        if not compare_digest(head[:TAG_BYTES], mac.digest()):
            raise AuthError("not sealed with our key")
        if len(fields) < ONE_RUN.size:
            raise AuthError(f"a head of {len(head)} bytes")
        way, number, n_runs, rank, stop = ONE_RUN.unpack_from(fields)
        if len(fields) != FIELDS.size + n_runs * RUN.size:
            raise AuthError(f"a head of {len(head)} bytes for {n_runs} runs")
        if n_runs > 1 or rank not in self._ranks or rank >= stop:
            rank = self._one_of_ours(fields)
        if way not in self._heard or rank is None:
            raise AuthError(f"nobody here is meant in lane {way}")
        lane, heard = self._heard[way]
        at = rank - self._ranks.start
        if number <= heard[at]:
            raise AuthError(f"message {number} of worker {rank} comes after {heard[at]}")
        heard[at] = number
        return lane, rank

    def _one_of_ours(self, fields: bytes) -> int | None:
        """Return the first of the ranks that are ours."""
        for start, stop in RUN.iter_unpack(fields[FIELDS.size :]):
            if start in self._ranks and start < stop:
                return int(start)
            if start < self._ranks.start < stop:
                return self._ranks.start
        return None
