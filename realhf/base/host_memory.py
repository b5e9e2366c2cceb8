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


def host_bytes(root: Path = Path("/")) -> int:
    """Return the memory that the processes of this host or container can use: that of the host, or of a cgroup.

    ``root`` is the root of the file system.
    """
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    own = root / "proc" / "self" / "cgroup"
    for line in own.read_text().splitlines() if own.is_file() else ():
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        file, mount = ("memory.max", "") if not controllers else ("memory.limit_in_bytes", "memory")
        folder = root / "sys" / "fs" / "cgroup" / mount
        # of the group and of those that contain it; a container sees its own group as the root
        groups = [folder, *(folder / part for part in Path(path.lstrip("/")).parents), folder / path.lstrip("/")]
        texts = [(group / file).read_text().strip() for group in groups if (group / file).is_file()]
        limits += [int(text) for text in texts if text.isdigit()]
    return min(limits)
