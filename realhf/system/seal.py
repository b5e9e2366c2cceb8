"""Messages that prove who sent them: before a payload stand rank, number in a lane, and a keyed BLAKE2b of it all.

A lane is one way between the master and one worker. Numbers in it only grow, so that a recorded message is not heard
again; the key is made for one launch, so that those of another are not heard at all.
"""

import hmac
import os
import secrets
import struct
from enum import IntEnum
from hashlib import blake2b
from pathlib import Path

FIELDS = struct.Struct("<BIQ")
TAG_BYTES = 32


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
    return blake2b(payload, digest_size=TAG_BYTES).digest()


def tag(key: bytes, fields: bytes, payload_digest: bytes) -> bytes:
    """Return the message authentication code (RFC 7693, keyed)."""
    return blake2b(fields + payload_digest, key=key, digest_size=TAG_BYTES).digest()


class Seal:
    """Numbers and signs what goes out in one lane of one worker."""

    def __init__(self, key: bytes, lane: Lane, rank: int) -> None:
        self._key, self._lane, self._rank, self._number = key, lane, rank, 0

    def head(self, payload_digest: bytes) -> bytes:
        """Return what is sent before the payload."""
        self._number += 1
        fields = FIELDS.pack(self._lane, self._rank, self._number)
        return fields + tag(self._key, fields, payload_digest)


class Gate:
    """Lets through what was sealed for one of ``lanes`` of one of ``ranks``, in order and once."""

    def __init__(self, key: bytes, lanes: tuple[Lane, ...], ranks: range) -> None:
        self._key, self._ranks = key, ranks
        self._heard = {int(lane): (lane, dict.fromkeys(ranks, 0)) for lane in lanes}

    def check(self, head: bytes, payload: bytes) -> tuple[Lane, int]:
        """Return lane and rank of a message; ``Refused`` says what is wrong with it."""
        if len(head) != FIELDS.size + TAG_BYTES:
            raise Refused(f"a head of {len(head)} bytes")
        fields = head[: FIELDS.size]
        way, rank, number = FIELDS.unpack(fields)
        if way not in self._heard or rank not in self._ranks:
            raise Refused(f"nobody is worker {rank} in lane {way}")
        if not hmac.compare_digest(head[FIELDS.size :], tag(self._key, fields, digest(payload))):
            raise Refused(f"not sealed by worker {rank}")
        lane, heard = self._heard[way]
        if number <= heard[rank]:
            raise Refused(f"message {number} of worker {rank} comes after {heard[rank]}")
        heard[rank] = number
        return lane, rank
