"""Sampling of probes, charged time, and peak memory."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from realhf.system.profiler.probes import MIN_ROUNDS, Clock, Probe, peak_bytes, point_of, sample

CPU = torch.device("cpu")


class FakeWork:
    """Records its runs, which advance its own clock."""

    def __init__(self) -> None:
        self.time = 0.0
        self.runs: list[str] = []

    def probe(self, name: str, seconds: float) -> Probe:
        def run() -> list[float]:
            self.runs.append(name)
            self.time += seconds
            return [seconds, 2 * seconds]

        return Probe(((name, {"call": 1}), ("all", {name: 1})), run, seconds)

    def like(self, probe: Probe, name: str) -> Probe:
        return replace(probe, works=((name, {"call": 2}), ("all", {name: 2})))

    def now(self) -> float:
        return self.time


def test_probes_are_interleaved_and_have_quartiles() -> None:
    work = FakeWork()
    found = sample([work.probe("long", 0.1), work.probe("short", 0.02)], 3.0, work.now)
    assert work.runs[:4] == ["short", "short", "long", "long"] and work.runs[4:8] == ["short", "long"] * 2
    assert set(found) == {"short", "long", "all"} and [p.counts for p in found["all"]] == [{"short": 1}, {"long": 1}]
    assert found["long"][0].low == found["long"][0].median == found["long"][0].high == 0.1
    assert found["long"][0].repeats == len(work.runs[4:]) / 2 and 2.5 < work.time < 3.5


def test_long_probes_are_dropped_and_short_ones_repeated() -> None:
    work = FakeWork()
    found = sample([work.probe("short", 0.002), work.like(work.probe("huge", 50.0), "short")], 1.0, work.now)
    assert "huge" not in work.runs and work.runs == ["short"] * len(work.runs)
    assert found["short"][0].repeats % 5 == 0


def test_smallest_probe_of_every_kind_is_always_run() -> None:
    work = FakeWork()
    found = sample([work.probe("short", 0.002), work.probe("huge", 50.0)], 1.0, work.now)
    assert found["huge"][0].repeats == MIN_ROUNDS


def test_without_probes_there_are_no_points() -> None:
    assert sample([], 1.0, FakeWork().now) == {}


def test_workers_agree_with_the_first_one() -> None:
    values: list[float] = []

    def agree(value: float) -> float:
        values.append(value)
        return 0.5

    work = FakeWork()
    found = sample([work.probe("short", 0.002)], 0.4, work.now, agree)
    assert found["short"][0].repeats == MIN_ROUNDS and len(values) == 2


def test_quartiles() -> None:
    point = point_of({"call": 1}, [5.0, 1.0, 3.0, 2.0, 4.0])
    assert (point.low, point.median, point.high, point.repeats) == (2.0, 3.0, 4.0, 5)
    assert point_of({"call": 1}, [-1.0]).low > 0


@pytest.mark.parametrize("world", [1, 2])
def test_charged_time_and_reset(world: int) -> None:
    clock = Clock(CPU, 1, world)
    ran: list[int] = []
    taken = clock.time(lambda: clock.charge(lambda: ran.append(1), 1000.0))
    assert 1000 <= taken < 1001 and ran == [1]
    before = clock()
    clock.reset()
    assert clock() < before - 900


def test_peak_bytes() -> None:
    if not Path("/proc/self/clear_refs").exists():
        pytest.skip("this system does not report memory")
    held: list[torch.Tensor] = []
    work: Callable[[], None] = lambda: held.append(torch.ones(10 << 20))
    assert 38 << 20 < peak_bytes(work, CPU) < 60 << 20
