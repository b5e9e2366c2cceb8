"""Messages that prove who sent them: before a payload stand lane, number, ranks, and a keyed BLAKE2b of it all.

The ranks are whom it is from or, from the master, everyone it is for: it says the same to many under one seal. Numbers
only grow in a lane, so that a recorded message is not heard again; the key is made for one launch, so that those of
another are not heard at all.
"""

import hmac
import os
import secrets
import struct
from collections.abc import Iterable
from enum import IntEnum
from hashlib import blake2b
from pathlib import Path

FIELDS = struct.Struct("<BQ")
RUN = struct.Struct("<II")  # ranks, start <= rank < stop
TAG_BYTES = 32
SHORT_BYTES = 512


class Lane(IntEnum):
    to_worker = 0
    to_master = 1
    beat = 2


class Refused(ValueError):
    """A message that nobody with the key has sent, or that was heard before."""


def new_key(path: Path) -> bytes:
    """Write a key of 32 bytes to a file that only its owner may read, in place of any that is there; return it."""
    path.unlink(missing_ok=True)
    key = secrets.token_bytes(TAG_BYTES)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(key)
    return key


def digest(payload: bytes) -> bytes:
    """Return what stands for a payload: its hash, so that many seals cost one; itself where that is shorter work.

    The first byte tells them apart: a short payload that reads like the hash of another does not stand for it.
    """
    if len(payload) <= SHORT_BYTES:
        return b"\0" + payload
    return b"\1" + blake2b(payload, digest_size=TAG_BYTES).digest()


def keyed(key: bytes) -> "blake2b":
    """Return the message authentication code of nothing yet (RFC 7693, keyed), for copies to go on from."""
    return blake2b(key=key, digest_size=TAG_BYTES)


def tag(mac: "blake2b", fields: bytes, payload_digest: bytes) -> bytes:
    """Return the message authentication code of a message; ``mac`` is that of nothing."""
    own = mac.copy()
    own.update(fields + payload_digest)
    return own.digest()


def runs_of(ranks: Iterable[int]) -> bytes:
    """Return ranks as runs, in order."""
    bounds: list[int] = []
    for rank in sorted(ranks):
        if bounds and bounds[-1] == rank:
            bounds[-1] += 1
        else:
            bounds += (rank, rank + 1)
    return struct.pack(f"<{len(bounds)}I", *bounds)


class Seal:
    """Numbers and signs what goes out in one lane, of one worker or to many."""

    def __init__(self, key: bytes, lane: Lane) -> None:
        self._mac, self._lane, self._number = keyed(key), lane, 0

    def head(self, ranks: Iterable[int], payload_digest: bytes) -> bytes:
        """Return what is sent before the payload."""
        self._number += 1
        fields = FIELDS.pack(self._lane, self._number) + runs_of(ranks)
        return tag(self._mac, fields, payload_digest) + fields


class Gate:
    """Lets through what was sealed for one of ``lanes`` of one of ``ranks``, in order and once."""

    def __init__(self, key: bytes, lanes: tuple[Lane, ...], ranks: range) -> None:
        self._mac, self._ranks = keyed(key), ranks
        self._heard = {int(lane): (lane, dict.fromkeys(ranks, 0)) for lane in lanes}

    def check(self, head: bytes, payload: bytes) -> tuple[Lane, int]:
        """Return lane and rank of a message; ``Refused`` says what is wrong with it."""
        fields, runs = head[TAG_BYTES:], head[TAG_BYTES + FIELDS.size :]
        if not runs or len(runs) % RUN.size:
            raise Refused(f"a head of {len(head)} bytes")
        if not hmac.compare_digest(head[:TAG_BYTES], tag(self._mac, fields, digest(payload))):
            raise Refused("not sealed with our key")
        way, number = FIELDS.unpack_from(fields)
        rank = self._one_of_ours(runs)
        if way not in self._heard or rank is None:
            raise Refused(f"nobody here is meant in lane {way}")
        lane, heard = self._heard[way]
        if number <= heard[rank]:
            raise Refused(f"message {number} of worker {rank} comes after {heard[rank]}")
        heard[rank] = number
        return lane, rank

    def _one_of_ours(self, runs: bytes) -> int | None:
        """Return the first of the ranks that are ours."""
        if len(runs) == RUN.size:  # a worker's own, thousands of times a step
            start, stop = RUN.unpack(runs)
            if start in self._ranks and start < stop:
                return int(start)
        for start, stop in RUN.iter_unpack(runs):
            if start in self._ranks and start < stop:
                return start
            if start < self._ranks.start < stop:
                return self._ranks.start
        return None
