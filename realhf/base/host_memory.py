"""Resident memory of this process."""

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


def trim_heap() -> None:
    """Return freed memory to the operating system; glibc caches it otherwise."""
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)
