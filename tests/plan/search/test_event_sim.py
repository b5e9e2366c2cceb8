"""Workers that carry out their inboxes in order, under a clock."""

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from realhf.api.machine import Cost
from realhf.plan.search.event_sim import CallOps, Op, WorkerQueues

Given = tuple[Sequence[int], float]


def order(first: Sequence[Given], rest: Sequence[Given] = (), cores: float = 1.0) -> CallOps:
    """Make an order of (ranks, seconds), each keeping ``cores`` busy."""
    jobs = [[Op(ranks, Cost(seconds, seconds * cores)) for ranks, seconds in some] for some in (first, rest)]
    return CallOps(None, *jobs)


def play(*orders: CallOps, cores: float = 0.0, latency: float = 0.0) -> list[tuple[CallOps, float]]:
    """Send orders together; return when the master hears of each."""
    inboxes, heard = WorkerQueues(4, cores, latency), []

    def answer(done: CallOps) -> list[list[CallOps]]:
        heard.append((done, inboxes.now))
        return []

    inboxes.run([orders], answer)
    return heard


def spans(*orders: CallOps) -> list[tuple[float, float]]:
    return [(job.start, job.end) for o in orders for job in o.ops]


def test_a_job_waits_for_all_its_workers_and_holds_them() -> None:
    some, both, other = order([([0], 3.0)]), order([([0, 1], 1.0)]), order([([1], 5.0)])
    heard = play(some, both, other)
    assert spans(some, both, other) == [(0, 3), (3, 4), (4, 9)]
    assert heard == [(some, 3), (both, 4), (other, 9)]
    assert both.first[0].predecessor is some.first[0] and other.first[0].predecessor is both.first[0]


def test_first_jobs_of_all_orders_go_before_the_rest_of_any() -> None:
    one, two = order([([0], 1.0)], [([0], 5.0)]), order([([0, 1], 1.0)], [([1], 5.0)])
    play(one, two)
    assert spans(one, two) == [(0, 1), (2, 7), (1, 2), (2, 7)]


def test_the_master_hears_after_the_latency_and_in_the_order_of_sending() -> None:
    orders = [order([([rank], 2.0)]) for rank in (3, 1, 2)]
    assert play(*orders, latency=0.5) == [(o, 2.5) for o in orders]


def test_an_order_is_over_when_its_last_job_ends_on_any_worker() -> None:
    long = order([([0], 1.0)], [([1], 9.0), ([0], 1.0)])
    assert play(long) == [(long, 9.0)] and long.last is long.rest[0]


def test_what_asks_for_more_cores_than_there_are_slows_down_in_proportion() -> None:
    # 3 cores wanted of 2 until 3 s, then 2 of 2
    one, two, three = order([([0], 2.0)]), order([([1], 4.0)]), order([([2], 4.0)])
    play(one, two, three, cores=2)
    assert spans(one, two, three) == [(0, 3), (0, pytest.approx(5)), (0, pytest.approx(5))]


def test_what_waits_for_others_leaves_its_cores_to_them() -> None:
    light, heavy = order([([0], 4.0)], cores=0.25), order([([1], 4.0)])
    assert [when for _, when in play(light, heavy, cores=1.25)] == [4, 4]
    light, heavy = order([([0], 4.0)], cores=0.5), order([([1], 4.0)])
    assert [when for _, when in play(light, heavy, cores=1.2)] == [pytest.approx(5), pytest.approx(5)]


@settings(deadline=None)
@given(st.lists(st.tuples(st.sets(st.integers(0, 3), min_size=1), st.integers(0, 5)), min_size=1, max_size=12))
def test_with_cores_enough_a_job_starts_when_its_workers_are_free(drawn: list[tuple[set[int], int]]) -> None:
    orders = [order([(sorted(ranks), float(seconds))]) for ranks, seconds in drawn]
    play(*orders)
    free = [0.0] * 4
    for o, (ranks, seconds) in zip(orders, drawn, strict=True):
        start = max(free[rank] for rank in ranks)
        assert (o.first[0].start, o.first[0].end) == (start, start + seconds)
        for rank in ranks:
            free[rank] = start + seconds


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.floats(0.01, 5), st.floats(0.1, 3)), min_size=1, max_size=12),
    st.floats(0.5, 4),
)
def test_cores_are_never_idle_while_more_are_wanted(drawn: list[tuple[int, float, float]], cores: float) -> None:
    orders = [order([([rank], seconds)], cores=wanted) for rank, seconds, wanted in drawn]
    end = max(when for _, when in play(*orders, cores=cores))
    work = sum(seconds * wanted for _, seconds, wanted in drawn)
    alone = max(sum(s for r, s, _ in drawn if r == rank) for rank in range(4))
    assert max(work / cores, alone) <= end * (1 + 1e-9)
    assert end <= (work / cores + alone) * (1 + 1e-9)
