"""What a process holds of the host's memory, and how it gives back what it no longer uses."""

import ctypes
import os
import resource
import sys
from pathlib import Path


def resident_bytes() -> tuple[int, int]:
    """Return this process's peak and present resident memory."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    statm = Path("/proc/self/statm")
    present = int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if statm.exists() else peak
    return peak, present


def trim_heap() -> None:
    """Return freed memory to the system where the C library would keep it (glibc does)."""
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)
