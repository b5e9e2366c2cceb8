"""Crash-safe file operations, checksums and file locks."""

import contextlib
import fcntl
import hashlib
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

Digests = dict[str, tuple[str, int]]  # file name -> SHA-256 and size
TMP_SUFFIX = ".unfinished"  # of files and folders that are incomplete or being removed


def fsync_and_hash(path: Path) -> tuple[str, int]:
    with path.open("rb") as file:
        os.fsync(file.fileno())
    return sha256(path), path.stat().st_size


def fsync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def atomic_write(path: Path, text: str) -> None:
    """Replace the content of a file; after a crash the file has either the old or the new content."""
    tmp = path.with_name(path.name + TMP_SUFFIX)
    tmp.write_text(text)
    fsync_and_hash(tmp)
    tmp.rename(path)


def discard(path: Path) -> None:
    """Remove a file, a link or a folder with its content."""
    shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def remove_folder(path: Path) -> None:
    """Remove a folder; after a crash it is either unchanged or gone."""
    tmp = path.with_name(path.name + TMP_SUFFIX)
    if tmp.exists():
        shutil.rmtree(tmp)
    path.rename(tmp)
    shutil.rmtree(tmp)


@contextlib.contextmanager
def try_lock(path: Path, timeout_s: float = 1.0) -> Iterator[bool]:
    """Hold a file lock until the context or the process ends; yield False if another process holds it.

    The file is removed at the end; a killed process leaves it unlocked. The timeout outlasts concurrent calls of
    ``is_locked``, which take the lock briefly. On a file system without locks the result is always True.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + timeout_s
    while (fd := _locked_file(path)) is None and time.monotonic() < deadline:
        time.sleep(0.01)
    try:
        yield fd is not None
    finally:
        if fd is not None:
            path.unlink(missing_ok=True)
            os.close(fd)


def _locked_file(path: Path) -> int | None:
    """Open and lock a file; None if another process holds it, or removed it meanwhile."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    with contextlib.suppress(FileNotFoundError):
        if _flock(fd) and os.path.samestat(os.fstat(fd), path.stat()):
            return fd
    os.close(fd)
    return None


def _flock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # the file system has no locks
        return True
    return True


def is_locked(path: Path) -> bool:
    try:
        fd = os.open(path, os.O_RDWR)
    except OSError:  # there is none, or it cannot be locked either
        return False
    try:
        return not _flock(fd)
    finally:
        os.close(fd)
