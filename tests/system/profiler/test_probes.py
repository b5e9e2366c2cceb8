"""Probes take turns, the clock can be told what time it is, and memory that is taken is seen."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from realhf.system.profiler.probes import MIN_ROUNDS, Clock, Probe, peak_bytes, point_of, resident_bytes, sample

CPU = torch.device("cpu")


class Diary:
    """Work that takes as long as it says on a clock of its own, and is written down."""

    def __init__(self) -> None:
        self.time = 0.0
        self.done: list[str] = []

    def probe(self, name: str, seconds: float) -> Probe:
        def run() -> list[float]:
            self.done.append(name)
            self.time += seconds
            return [seconds, 2 * seconds]

        return Probe(((name, {"call": 1}), ("all", {name: 1})), run, seconds)

    def like(self, probe: Probe, name: str) -> Probe:
        return replace(probe, works=((name, {"call": 2}), ("all", {name: 2})))

    def now(self) -> float:
        return self.time


def test_probes_take_turns_and_every_work_gets_its_quartiles() -> None:
    diary = Diary()
    found = sample([diary.probe("long", 0.1), diary.probe("short", 0.02)], 3.0, diary.now)
    assert diary.done[:4] == ["short", "short", "long", "long"] and diary.done[4:8] == ["short", "long"] * 2
    assert set(found) == {"short", "long", "all"} and [p.counts for p in found["all"]] == [{"short": 1}, {"long": 1}]
    assert found["long"][0].low == found["long"][0].median == found["long"][0].high == 0.1
    assert found["long"][0].repeats == len(diary.done[4:]) / 2 and 2.5 < diary.time < 3.5


def test_what_takes_too_long_is_left_out_and_what_is_short_is_repeated() -> None:
    diary = Diary()
    found = sample([diary.probe("short", 0.002), diary.like(diary.probe("endless", 50.0), "short")], 1.0, diary.now)
    assert "endless" not in diary.done and diary.done == ["short"] * len(diary.done)
    assert found["short"][0].repeats % 5 == 0


def test_the_smallest_of_every_kind_is_run_however_long_it_takes() -> None:
    diary = Diary()
    found = sample([diary.probe("short", 0.002), diary.probe("endless", 50.0)], 1.0, diary.now)
    assert found["endless"][0].repeats == MIN_ROUNDS


def test_workers_go_by_what_the_first_one_says() -> None:
    said: list[float] = []

    def agree(value: float) -> float:
        said.append(value)
        return 0.5

    diary = Diary()
    found = sample([diary.probe("short", 0.002)], 0.4, diary.now, agree)
    assert found["short"][0].repeats == MIN_ROUNDS and len(said) == 2


def test_quartiles() -> None:
    point = point_of({"call": 1}, [5.0, 1.0, 3.0, 2.0, 4.0])
    assert (point.low, point.median, point.high, point.repeats) == (2.0, 3.0, 4.0, 5)
    assert point_of({"call": 1}, [-1.0]).low > 0


@pytest.mark.parametrize("world", [1, 2])
def test_the_clock_believes_what_it_is_told(world: int) -> None:
    clock = Clock(CPU, 1, world)
    ran: list[int] = []
    taken = clock.time(lambda: clock.charge(lambda: ran.append(1), 1000.0))
    assert 1000 <= taken < 1001 and ran == [1]
    before = clock()
    clock.reset()
    assert clock() < before - 900


def test_memory_that_is_taken_is_seen() -> None:
    if not resident_bytes():
        pytest.skip("this system does not tell")
    held: list[torch.Tensor] = []
    work: Callable[[], None] = lambda: held.append(torch.ones(10 << 20))
    assert 38 << 20 < peak_bytes(work, CPU) < 60 << 20
