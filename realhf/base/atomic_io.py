"""Files that survive a power cut, how to tell whether they are what they were, and whether somebody is at them."""

import contextlib
import fcntl
import hashlib
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

Digests = dict[str, tuple[str, int]]
"""File name -> SHA-256 and size."""
TMP_SUFFIX = ".unfinished"
"""How the name of a file or folder ends that does not count yet, or no longer."""


def fsync_and_hash(path: Path) -> tuple[str, int]:
    """See to it that a file is on the disk, and return its SHA-256 and size."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
    return sha256(path), path.stat().st_size


def fsync_folder(folder: Path) -> None:
    """See to it that the names in a folder are on the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def atomic_write(path: Path, text: str) -> None:
    """Give a file another text: whatever happens meanwhile, it is there with the old one or with the new one."""
    rest = path.with_name(path.name + TMP_SUFFIX)
    rest.write_text(text)
    fsync_and_hash(rest)
    rest.rename(path)


def remove_folder(path: Path) -> None:
    """Remove a folder: whatever happens meanwhile, it is there as it was or not at all."""
    rest = path.with_name(path.name + TMP_SUFFIX)
    if rest.exists():
        shutil.rmtree(rest)
    path.rename(rest)
    shutil.rmtree(rest)


@contextlib.contextmanager
def try_lock(path: Path, patience_s: float = 1.0) -> Iterator[bool]:
    """Hold a lock that goes with this process, however it ends; yields False where somebody else keeps it.

    Those that only look (``is_held``) have it for a moment. Where the file system knows no locks, nobody is kept out.
    """
    fd, end = os.open(path, os.O_RDWR | os.O_CREAT, 0o644), time.monotonic() + patience_s
    try:
        while not (is_mine := _lock(fd)) and time.monotonic() < end:
            time.sleep(0.01)
        yield is_mine
    finally:
        os.close(fd)


def _lock(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True  # no locks here
    return True


def is_locked(path: Path) -> bool:
    """Tell whether a process holds a lock."""
    if not path.exists():
        return False
    with try_lock(path, 0.0) as is_free:
        return not is_free
