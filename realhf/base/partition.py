"""Deterministic partitions: weighted items in balanced parts, numbers in consecutive runs."""

from collections.abc import Sequence
from heapq import heapreplace
from itertools import pairwise


def balanced_partition(weights: Sequence[int], k: int) -> list[list[int]]:
    """Split indices into ``k`` parts of nearly equal weight (longest-processing-time-first).

    Each part is in ascending order; with fewer items than parts some are empty. Ties go to the part with fewer items,
    then to the lower part number, so the result depends on the weights only.
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
    """Pack indices into bins of at most ``capacity`` (first-fit decreasing), and at least ``min_bins`` of them.

    An item heavier than the capacity gets its own bin. No bin is empty, so there are never more bins than items.
    """
    if capacity < 1:
        raise ValueError(f"bin capacity must be positive, got {capacity}")
    if not weights:
        return []
    bins: list[list[int]] = []
    loads: list[int] = []
    n_full, lightest = 0, min(weights)  # the first n_full bins cannot take even the lightest item
    for i in sorted(range(len(weights)), key=weights.__getitem__, reverse=True):
        while n_full < len(loads) and loads[n_full] + lightest > capacity:
            n_full += 1
        fit = next((b for b in range(n_full, len(loads)) if loads[b] + weights[i] <= capacity), None)
        if fit is None:
            bins.append([i])
            loads.append(weights[i])
        else:
            bins[fit].append(i)
            loads[fit] += weights[i]
    if len(bins) >= min_bins:
        return [sorted(part) for part in bins]
    k, capacity = min(min_bins, len(weights)), max(capacity, max(weights))
    parts = balanced_partition(weights, k)
    while max(sum(weights[i] for i in part) for part in parts) > capacity:
        k += 1
        parts = balanced_partition(weights, k)
    return parts


def consecutive_runs(numbers: Sequence[int]) -> tuple[range, ...]:
    """Return the places of the runs of consecutive numbers in an ascending sequence."""
    starts = [i for i, number in enumerate(numbers) if i == 0 or number != numbers[i - 1] + 1]
    return tuple(range(*span) for span in pairwise([*starts, len(numbers)]))
