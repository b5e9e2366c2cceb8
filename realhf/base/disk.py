"""Files that survive a power cut, and how to tell whether they are what they were."""

import hashlib
import os
from pathlib import Path

Digests = dict[str, tuple[str, int]]
"""File name -> SHA-256 and size."""


def flushed(path: Path) -> tuple[str, int]:
    """See to it that a file is on the disk, and return its SHA-256 and size."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
    return sha256(path), path.stat().st_size


def sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()
