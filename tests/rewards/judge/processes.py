"""Which processes descend from a test, and whether they are gone."""

import os
import time
from pathlib import Path


def parents() -> dict[int, int]:
    """Every living process and its parent."""
    found = {}
    for file in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = file.read_text().rpartition(")")[2].split()[:2]
        except OSError:
            continue  # gone
        if state != "Z":
            found[int(file.parent.name)] = int(parent)
    return found


def descendants() -> set[int]:
    """Living processes that this one started, or those did."""
    tree, found = parents(), {os.getpid()}
    while more := {pid for pid, parent in tree.items() if parent in found} - found:
        found |= more
    return found - {os.getpid()}


def gone(pids: set[int]) -> bool:
    """Whether none of ``pids`` lives any more; the kernel takes a moment over what was killed."""
    for _ in range(500):
        if not pids & set(parents()):
            return True
        time.sleep(0.01)
    return False
