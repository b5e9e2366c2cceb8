"""Timing of probes: small pieces of work that run in turns, and the quartiles of their times.

Disturbances of a machine last for a while; interleaved probes are all affected equally.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch

from realhf.base.host_memory import proc_field, resident_bytes, trim_heap
from realhf.comm.process_groups import Group
from realhf.plan.machines.profile import Counts, Point

MIN_ROUNDS, MAX_ROUNDS = 4, 60
SHORT_S = 0.01
"""Shorter probes are repeated within a round."""
MAX_ROUND_FRACTION = 0.15
"""Limit on one round of all probes, as a fraction of the total time; the largest probes are dropped."""

Now = Callable[[], float]
Agree = Callable[[float], float]
"""Broadcasts the first worker's value, so that all workers take the same decisions."""


def agreement(group: Group, device: torch.device) -> Agree:
    return lambda value: float(group.broadcast(torch.tensor([value], dtype=torch.float64, device=device), 0))


@dataclass(frozen=True, eq=False)
class Probe:
    """A timed piece of work. ``run`` returns the seconds of each of ``works``, which are pairs of (name, counts).

    ``size`` is roughly proportional to its time, among the probes that it is sampled with.
    """

    works: tuple[tuple[str, Counts], ...]
    run: Callable[[], Sequence[float]]
    size: float = 1.0


class Clock:
    """Time of a worker, after synchronizing its device.

    A single worker on one CPU thread is timed in processor time, which excludes other processes on its core. With
    several workers, waiting for each other is part of the work.
    """

    def __init__(self, device: torch.device, threads: int, world: int) -> None:
        self.device = device
        self.now = time.process_time if device.type == "cpu" and threads == world == 1 else time.perf_counter
        self._offset = 0.0

    def __call__(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return self.now() - self._offset

    def time(self, work: Callable[[], object]) -> float:
        start = self()
        work()
        return self() - start

    def charge(self, work: Callable[[], object], seconds: float) -> None:
        """Run ``work`` and advance the clock by ``seconds`` instead of its actual time."""
        self._offset += self.time(work) - seconds

    def reset(self) -> None:
        """Undo all charges."""
        self._offset = 0.0


def sample(probes: Sequence[Probe], seconds: float, now: Now, agree: Agree = float) -> dict[str, list[Point]]:
    """Run the probes in turns for about ``seconds`` and return the points of every kind of work."""
    if not probes:
        return {}
    start = now()
    selected, repeats = _select(sorted(probes, key=lambda probe: probe.size), seconds, now, agree)
    samples: list[list[Sequence[float]]] = [[] for _ in selected]
    for number in range(MAX_ROUNDS):
        if number >= MIN_ROUNDS and agree(now() - start) > seconds:
            break
        for probe, times, n in zip(selected, samples, repeats, strict=True):
            times += [probe.run() for _ in range(n)]
    points: dict[str, list[Point]] = {}
    for probe, times in zip(selected, samples, strict=True):
        for (name, counts), values in zip(probe.works, zip(*times, strict=True), strict=True):
            points.setdefault(name, []).append(point_of(counts, values))
    return points


def _select(probes: Sequence[Probe], seconds: float, now: Now, agree: Agree) -> tuple[list[Probe], list[int]]:
    """Warm up probes, smallest first, until a round takes too long; return them and their repeats per round.

    The smallest probe of every kind of work is always included.
    """
    selected: dict[Probe, float] = {}
    seen: set[str] = set()
    seconds_per_size, limit_s = 0.0, MAX_ROUND_FRACTION * seconds
    for probe in probes:
        names = {name for name, _ in probe.works}
        if names <= seen and agree(sum(selected.values()) + seconds_per_size * probe.size) > limit_s:
            continue
        probe.run()
        start = now()
        probe.run()
        selected[probe] = duration = max(agree(now() - start), 1e-6)
        seconds_per_size = duration / probe.size
        seen |= names
    target_s = min(SHORT_S, limit_s / len(selected))
    return list(selected), [max(1, min(20, int(target_s / duration))) for duration in selected.values()]


def point_of(counts: Counts, values: Sequence[float]) -> Point:
    """Return the quartiles of measurements, clamped to be positive."""
    ordered = sorted(max(value, 1e-9) for value in values)
    n = len(ordered)
    return Point(counts, ordered[n // 4], median(ordered), ordered[3 * n // 4], n)


def peak_bytes(work: Callable[[], object], device: torch.device) -> float:
    """Return the peak memory of ``work`` beyond the current usage; 0 if the system does not report it."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        work()
        return float(torch.cuda.max_memory_allocated(device) - before)
    clear_refs = Path("/proc/self/clear_refs")
    if not clear_refs.exists():
        return 0.0
    trim_heap()  # reuse of freed memory would not be counted
    _, before = resident_bytes()
    clear_refs.write_text("5")  # reset the peak
    work()
    peak = int(proc_field("self/status", "VmHWM").removesuffix("kB") or 0) << 10
    return float(max(peak - before, 0))
