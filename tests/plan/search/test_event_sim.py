"""Discrete-event simulation of worker queues."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from realhf.api.machine import Cost
from realhf.plan.search.event_sim import CallOps, Op, WorkerQueues

OpSpec = tuple[Sequence[int], float]


def call_of(specs: Sequence[OpSpec], cores: float = 1.0) -> CallOps:
    """Return a call with operations (ranks, seconds) that each use ``cores`` cores."""
    return CallOps(None, [Op(ranks, Cost(seconds, seconds * cores)) for ranks, seconds in specs])


def play(*calls: CallOps, cores: float = 0.0, latency: float = 0.0) -> list[tuple[CallOps, float]]:
    """Send calls together; return the time at which each is reported."""
    queues, reported = WorkerQueues(4, cores, latency), []

    def on_finished(done: CallOps) -> list[list[CallOps]]:
        reported.append((done, queues.now))
        return []

    queues.run([calls], on_finished)
    return reported


def spans(*calls: CallOps) -> list[tuple[float, float]]:
    return [(op.start, op.end) for o in calls for op in o.ops]


def test_an_operation_waits_for_and_occupies_all_its_workers() -> None:
    some, both, other = call_of([([0], 3.0)]), call_of([([0, 1], 1.0)]), call_of([([1], 5.0)])
    reported = play(some, both, other)
    assert spans(some, both, other) == [(0, 3), (3, 4), (4, 9)]
    assert reported == [(some, 3), (both, 4), (other, 9)]
    assert both.ops[0].predecessor is some.ops[0] and other.ops[0].predecessor is both.ops[0]


def test_first_operations_of_all_calls_precede_the_rest() -> None:
    one, two = call_of([([0], 1.0), ([0], 5.0)]), call_of([([0, 1], 1.0), ([1], 5.0)])
    play(one, two)
    assert spans(one, two) == [(0, 1), (2, 7), (1, 2), (2, 7)]


def test_calls_are_reported_after_the_latency_in_sending_order() -> None:
    calls = [call_of([([rank], 2.0)]) for rank in (3, 1, 2)]
    assert play(*calls, latency=0.5) == [(o, 2.5) for o in calls]


def test_a_call_finishes_with_its_last_operation() -> None:
    long = call_of([([0], 1.0), ([1], 9.0), ([0], 1.0)])
    assert play(long) == [(long, 9.0)] and long.last is long.ops[1]


def test_oversubscribed_cores_slow_down_all_operations() -> None:
    # 3 cores wanted of 2 until 3 s, then 2 of 2
    one, two, three = call_of([([0], 2.0)]), call_of([([1], 4.0)]), call_of([([2], 4.0)])
    play(one, two, three, cores=2)
    assert spans(one, two, three) == [(0, 3), (0, pytest.approx(5)), (0, pytest.approx(5))]


def test_partial_use_of_cores() -> None:
    light, heavy = call_of([([0], 4.0)], cores=0.25), call_of([([1], 4.0)])
    assert [when for _, when in play(light, heavy, cores=1.25)] == [4, 4]
    light, heavy = call_of([([0], 4.0)], cores=0.5), call_of([([1], 4.0)])
    assert [when for _, when in play(light, heavy, cores=1.2)] == [pytest.approx(5), pytest.approx(5)]


@given(st.lists(st.tuples(st.sets(st.integers(0, 3), min_size=1), st.integers(0, 5)), min_size=1, max_size=12))
def test_operations_start_when_their_workers_are_free(specs: list[tuple[set[int], int]]) -> None:
    calls = [call_of([(sorted(ranks), float(seconds))]) for ranks, seconds in specs]
    play(*calls)
    free = [0.0] * 4
    for o, (ranks, seconds) in zip(calls, specs, strict=True):
        start = max(free[rank] for rank in ranks)
        assert (o.ops[0].start, o.ops[0].end) == (start, start + seconds)
        for rank in ranks:
            free[rank] = start + seconds


@given(
    st.lists(st.tuples(st.integers(0, 3), st.floats(0.01, 5), st.floats(0.1, 3)), min_size=1, max_size=12),
    st.floats(0.5, 4),
)
def test_total_time_is_bounded_by_core_seconds(specs: list[tuple[int, float, float]], cores: float) -> None:
    calls = [call_of([([rank], seconds)], cores=wanted) for rank, seconds, wanted in specs]
    end = max(when for _, when in play(*calls, cores=cores))
    work = sum(seconds * wanted for _, seconds, wanted in specs)
    alone = max(sum(s for r, s, _ in specs if r == rank) for rank in range(4))
    assert max(work / cores, alone) <= end * (1 + 1e-9)
    assert end <= (work / cores + alone) * (1 + 1e-9)
