"""Resident memory of this process, and fields of /proc."""

import ctypes
import os
import resource
import sys
from pathlib import Path


def resident_bytes() -> tuple[int, int]:
    """Return the peak and the current resident memory of this process."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    statm = Path("/proc/self/statm")
    current = int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if statm.exists() else peak
    return peak, current


def proc_field(file: str, name: str) -> str:
    """Return the first field ``name`` of a file in /proc, such as ``self/status``; empty if there is none."""
    path = Path("/proc", file)
    fields = (line.partition(":") for line in (path.read_text().splitlines() if path.exists() else ()))
    return next((value.strip() for key, _, value in fields if key.strip() == name), "")


def trim_heap() -> None:
    """Return freed memory to the operating system; glibc caches it otherwise."""
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)
