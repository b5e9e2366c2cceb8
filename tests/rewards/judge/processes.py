"""Descendant processes of a test."""

import os
import time
from pathlib import Path


def parents() -> dict[int, int]:
    """Return the parent of each running process."""
    result = {}
    for file in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = file.read_text().rpartition(")")[2].split()[:2]
        except OSError:
            continue  # it has exited
        if state != "Z":
            result[int(file.parent.name)] = int(parent)
    return result


def descendants() -> set[int]:
    """Return all descendants of this process."""
    tree, found = parents(), {os.getpid()}
    while more := {pid for pid, parent in tree.items() if parent in found} - found:
        found |= more
    return found - {os.getpid()}


def have_exited(pids: set[int]) -> bool:
    """Return True if all processes exit within 5 s; killed ones take a moment."""
    for _ in range(500):
        if not pids & set(parents()):
            return True
        time.sleep(0.01)
    return False
