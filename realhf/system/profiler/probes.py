"""How the profiler times things: small pieces of work, run in turns for a while, and the quartiles of what they took.

What disturbs a machine comes in spells; by turns it hits all pieces alike.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch

from realhf.base.host_memory import trim_heap
from realhf.comm.process_groups import Group
from realhf.plan.cost.profile import Counts, Point

MIN_ROUNDS, MAX_ROUNDS = 4, 60
SHORT_S = 0.01
"""Pieces shorter than this are repeated within a round."""
LONGEST_ROUND = 0.15
"""What all pieces together may take of the time there is, once each; the largest are left out."""

Now = Callable[[], float]
Agree = Callable[[float], float]
"""Gives every worker what the first one says: they have to go through the same pieces."""


def agreement(group: Group, device: torch.device) -> Agree:
    return lambda value: float(group.broadcast(torch.tensor([value], dtype=torch.float64, device=device), 0))


@dataclass(frozen=True, eq=False)
class Probe:
    """A piece of work. ``run`` returns the seconds of each of ``works``: kinds of work and how much of them there is.

    ``size`` is roughly in proportion to its time, among the probes it is measured with.
    """

    works: tuple[tuple[str, Counts], ...]
    run: Callable[[], Sequence[float]]
    size: float = 1.0


class Clock:
    """Seconds that a worker has computed for: it waits for its device first.

    A worker that is alone on one thread of a CPU counts processor time: what others take of its core is not seen.
    With others, waiting for them is part of the work.
    """

    def __init__(self, device: torch.device, threads: int, world: int) -> None:
        self.device = device
        self.now = time.process_time if device.type == "cpu" and threads == world == 1 else time.perf_counter
        self._aside = 0.0

    def __call__(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return self.now() - self._aside

    def of(self, work: Callable[[], object]) -> float:
        start = self()
        work()
        return self() - start

    def pretend(self, work: Callable[[], object], seconds: float) -> None:
        """Let ``work`` take ``seconds``, whatever it takes."""
        self._aside += self.of(work) - seconds

    def forget(self) -> None:
        """Let what was pretended so far not have been."""
        self._aside = 0.0


def sample(probes: Sequence[Probe], seconds: float, now: Now, agree: Agree = float) -> dict[str, list[Point]]:
    """Run the probes by turns for about ``seconds`` and return the points of every kind of work."""
    start = now()
    chosen, repeats = _that_fit(sorted(probes, key=lambda probe: probe.size), seconds, now, agree)
    taken: list[list[Sequence[float]]] = [[] for _ in chosen]
    for turn in range(MAX_ROUNDS):
        if turn >= MIN_ROUNDS and agree(now() - start) > seconds:
            break
        for probe, times, n in zip(chosen, taken, repeats, strict=True):
            times += [probe.run() for _ in range(n)]
    points: dict[str, list[Point]] = {}
    for probe, times in zip(chosen, taken, strict=True):
        for (name, counts), values in zip(probe.works, zip(*times, strict=True), strict=True):
            points.setdefault(name, []).append(point_of(counts, values))
    return points


def _that_fit(probes: Sequence[Probe], seconds: float, now: Now, agree: Agree) -> tuple[list[Probe], list[int]]:
    """Warm the probes up, smallest first, as long as a round of them is short enough; say how often to repeat each.

    The smallest of every kind of work is run however long it takes.
    """
    chosen: dict[Probe, float] = {}
    seen: set[str] = set()
    pace = 0.0
    for probe in probes:
        names = {name for name, _ in probe.works}
        if names <= seen and agree(sum(chosen.values()) + pace * probe.size) > LONGEST_ROUND * seconds:
            continue
        probe.run()
        start = now()
        probe.run()
        chosen[probe] = took = max(agree(now() - start), 1e-6)
        pace = took / probe.size
        seen |= names
    turn = min(SHORT_S, LONGEST_ROUND * seconds / len(chosen))
    return list(chosen), [max(1, min(20, int(turn / took))) for took in chosen.values()]


def point_of(counts: Counts, values: Sequence[float]) -> Point:
    """Return the quartiles of some measurements; what was lost in the clock's noise counts as next to nothing."""
    ordered = sorted(max(value, 1e-9) for value in values)
    n = len(ordered)
    return Point(counts, ordered[n // 4], median(ordered), ordered[3 * n // 4], n)


def memory_now() -> int:
    """Return the resident bytes of this process; 0 where the system does not tell."""
    return _status("VmRSS")


def _status(field: str) -> int:
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith(f"{field}:")), 0)


def peak_bytes(work: Callable[[], object], device: torch.device) -> float:
    """Return what ``work`` takes at most beyond what is in use before; 0 where the system does not tell."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        work()
        return float(torch.cuda.max_memory_allocated(device) - before)
    reset = Path("/proc/self/clear_refs")
    if not reset.exists():
        return 0.0
    trim_heap()  # what was freed would be used again unseen
    before = memory_now()
    reset.write_text("5")
    work()
    return float(max(_status("VmHWM") - before, 0))
