"""Balanced partitions of weighted things: rows over data-parallel ranks, rows into micro-batches. Deterministic."""

from collections.abc import Sequence
from heapq import heapreplace


def balanced_partition(weights: Sequence[int], k: int) -> list[list[int]]:
    """Split indices into ``k`` parts of nearly equal weight (longest first onto the lightest part).

    Parts may be empty when there are fewer items than parts. Each part lists its indices in ascending order; ties go
    to the part with fewer items and then the lower number, so the answer depends on the weights alone.
    """
    if k < 1:
        raise ValueError(f"cannot split into {k} parts")
    parts: list[list[int]] = [[] for _ in range(k)]
    loads = [(0, 0, part) for part in range(k)]
    for i in sorted(range(len(weights)), key=weights.__getitem__, reverse=True):  # stable: ties in order
        load, n, lightest = loads[0]
        parts[lightest].append(i)
        heapreplace(loads, (load + weights[i], n + 1, lightest))
    return [sorted(part) for part in parts]


def pack_bins(weights: Sequence[int], capacity: int, min_bins: int = 1) -> list[list[int]]:
    """Pack indices into bins of at most ``capacity`` (first-fit decreasing), never fewer than ``min_bins``.

    An item heavier than the capacity gets a bin of its own. ``min_bins`` is a wish: no empty bin is returned.
    """
    if capacity < 1:
        raise ValueError(f"bin capacity must be positive, got {capacity}")
    if not weights:
        return []
    bins: list[list[int]] = []
    loads: list[int] = []
    full, least = 0, min(weights)  # the first bins, in which nothing has room
    for i in sorted(range(len(weights)), key=weights.__getitem__, reverse=True):
        while full < len(loads) and loads[full] + least > capacity:
            full += 1
        fit = next((b for b in range(full, len(loads)) if loads[b] + weights[i] <= capacity), None)
        if fit is None:
            bins.append([i])
            loads.append(weights[i])
        else:
            bins[fit].append(i)
            loads[fit] += weights[i]
    if len(bins) < min_bins:
        return _spread(weights, max(capacity, max(weights)), min(min_bins, len(weights)))
    return [sorted(part) for part in bins]


def _spread(weights: Sequence[int], capacity: int, k: int) -> list[list[int]]:
    """Return the balanced partition into ``k`` parts, or into the few more that it takes to keep to the capacity."""
    parts = balanced_partition(weights, k)
    while max(sum(weights[i] for i in part) for part in parts) > capacity:
        k += 1
        parts = balanced_partition(weights, k)
    return parts
