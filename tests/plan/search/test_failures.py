"""Simulation of runs with failures."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from random import Random
from statistics import mean, stdev

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from realhf.plan.goodput import CheckpointTimes, FailureRate, best_cadence, useful_share
from realhf.plan.search.failures import (
    FailureSimulator,
    NodeFailure,
    RecoveryRule,
    RunResult,
    SimulatedPlan,
    SlowPeriod,
    StepOps,
    step_ops,
)
from tests.plan.search.planners import ppo_planner
from tests.plan.search.test_simulate import APART, GRAPH, run

STEP_S = 11.0
OPS = step_ops(run(APART))
"""Transfers of 0.5 s, gen 4 s, rew 1 s beside ref 2 s, train 3 s."""
NEVER = 1e15
ONE = RecoveryRule(5.0, 20.0)


def simulator(cadence: int | None, copy_s: float = 2.0, write_s: float = 4.0, ops: StepOps = OPS) -> FailureSimulator:
    plan = SimulatedPlan(1, ops, cadence, CheckpointTimes(copy_s, write_s))
    return FailureSimulator(GRAPH, lambda n_nodes: replace(plan, n_nodes=n_nodes))


def at(*times: float, node: int = 0) -> Iterator[NodeFailure]:
    return chain((NodeFailure(t, node) for t in times), (NodeFailure(NEVER + i, node) for i in range(10**9)))


def poisson(mtbf_s: float, seed: int, n_nodes: int = 1) -> Iterator[NodeFailure]:
    random, now = Random(seed), 0.0
    while True:
        now += random.expovariate(1 / mtbf_s)
        yield NodeFailure(now, random.randrange(n_nodes))


def test_operations_of_a_step() -> None:
    assert OPS.groups == (1, 1)
    assert OPS.calls["gen"] == (((0,), 0.5), ((0,), 4.0))
    assert OPS.calls["rew"] == (((0, 1), 0.5), ((1,), 1.0))
    assert [OPS.group_of(worker) for worker in range(3)] == [0, 1, None]


@pytest.mark.parametrize("rule", ["real", "megatron", "split"])
def test_a_step_takes_as_long_as_in_the_full_simulation(rule: str) -> None:
    planner = ppo_planner(8)
    prediction = planner.predict(planner.by_heuristic(rule))
    ops = step_ops(prediction.timeline, planner.calls.cost.speed.call)
    assert sum(ops.groups) == 8
    plan = SimulatedPlan(1, ops, None)
    done = FailureSimulator(planner.graph, lambda n: plan).run(ONE, at(), 1, 200, NEVER)
    assert done.seconds / 200 == pytest.approx(prediction.seconds, rel=0.02)  # row lengths differ between steps


def test_a_run_without_failures() -> None:
    done = simulator(4).run(ONE, at(), 1, 10, NEVER)
    # checkpoints after steps 4, 8 and 10; the last one is awaited
    assert done.seconds == pytest.approx(10 * STEP_S + 2 * 2 + 2 + 4)
    assert (done.kept, done.executed, done.launches, done.down_s) == (10, 10, 1, 0.0)


def test_writing_that_outlasts_a_step_delays_the_next() -> None:
    done = simulator(4, write_s=13.0).run(ONE, at(), 1, 8, NEVER)
    assert done.seconds == pytest.approx(8 * STEP_S + 2 + (13 - 11) + 2 + 13)


def test_a_failure_during_a_checkpoint_falls_back_to_the_one_before() -> None:
    first = 4 * STEP_S + 2  # the copy of step 4 is complete; it counts when step 5 has ended
    second = 8 * STEP_S + 2
    cases = {first - 1: 0, first + STEP_S - 0.1: 0, first + STEP_S + 0.1: 4, second: 4, second + 1: 4,
             second + 2 + STEP_S - 0.1: 4, second + 2 + STEP_S + 0.1: 8}  # fmt: skip
    for time, resumed in cases.items():
        done = simulator(4).run(ONE, at(time), 1, 12, NEVER)
        assert done.resumed_at == [0, resumed], time
        assert done.kept == 12 and done.down_s == pytest.approx(25.0)


def test_no_step_counts_twice() -> None:
    done = simulator(4).run(ONE, at(100.0), 1, 12, NEVER)  # after 8 steps; only the checkpoint of step 4 is complete
    assert (done.kept, done.executed) == (12, 8 + 8)
    until = simulator(4).run(ONE, at(100.0), 1, 12, 125.0 + 4 * STEP_S + 2 + STEP_S)
    assert (until.kept, until.executed) == (8, 8 + 5)


def test_a_failure_during_the_recovery_starts_it_again() -> None:
    once, twice = (simulator(4).run(ONE, at(*times), 1, 12, NEVER) for times in ((100.0,), (100.0, 110.0)))
    assert twice.down_s == once.down_s + 10.0 and twice.seconds == once.seconds + 10.0
    assert (twice.failures, twice.launches, twice.resumed_at) == (2, 2, [0, 4])
    assert simulator(4).run(ONE, at(100.0), 1, 12, 115.0).down_s == 15.0


def test_without_checkpoints_a_run_starts_from_scratch() -> None:
    done = simulator(None).run(ONE, at(30.0, 100.0), 1, 5, NEVER)
    assert done.resumed_at == [0, 0, 0] and done.seconds == 125.0 + 5 * STEP_S and done.kept == 5
    assert simulator(None).run(ONE, at(30.0, 100.0), 1, 50, 200.0).kept == 0


def test_nodes() -> None:
    """Two nodes, one of which fails: a run waits for its repair, or continues on the other, with slower steps."""
    slow = StepOps({m: tuple((g, 2 * s) for g, s in ops) for m, ops in OPS.calls.items()}, OPS.groups)
    simulated = FailureSimulator(GRAPH, lambda n: SimulatedPlan(n, OPS if n == 2 else slow, 1))
    wait = RecoveryRule(5.0, 20.0, repair_s=500.0)
    elastic, regrows = replace(wait, is_elastic=True), replace(wait, is_elastic=True, regrows=True)
    assert simulated.run(wait, at(99.0, 99.5, node=1), 2, 100, 10_000.0).down_s == 520.0
    # failures of a node that is not in use have no effect
    assert simulated.run(elastic, at(99.0, 1000.0, node=1), 2, 100, 10_000.0).failures == 1
    done = simulated.run(elastic, at(99.0, node=1), 2, 20, NEVER)
    assert done.seconds == pytest.approx(99 + 25 + 12 * 2 * STEP_S)
    both = [NodeFailure(99.0, 1), NodeFailure(700.0, 0)]
    for rule, rest in ((elastic, 500 + 20), (regrows, 5 + 20)):  # all nodes are down, or the repaired one takes over
        done = simulated.run(rule, iter([*both, NodeFailure(NEVER, 0)]), 2, 100, 5000.0)
        assert done.down_s == 25 + rest


def test_a_slow_worker_delays_its_operations() -> None:
    period = SlowPeriod(STEP_S, 2 * STEP_S, 0, 3.0)
    done = simulator(None).run(ONE, at(), 1, 3, NEVER, [period])
    # 3 x (0.5 + 4) s of the second step; the calls that start at 24.5 s are not delayed any more
    assert done.seconds == pytest.approx(3 * STEP_S + 2 * 4.5)
    other = simulator(None).run(ONE, at(), 1, 3, NEVER, [replace(period, worker=1)])
    assert STEP_S * 3 < other.seconds < done.seconds


@pytest.mark.parametrize("cadence, copy_s, write_s, mtbf", [(10, 5, 8, 1000), (1, 5, 36, 500), (20, 22, 1, 1000)])
def test_the_share_of_the_closed_form(cadence: int, copy_s: float, write_s: float, mtbf: float) -> None:
    simulated = simulator(cadence, copy_s, write_s)
    shares = [simulated.run(ONE, poisson(mtbf, seed), 1, 10**9, 100 * mtbf).share(STEP_S) for seed in range(40)]
    expected = useful_share(STEP_S, cadence, CheckpointTimes(copy_s, write_s), FailureRate(mtbf, 25.0))
    error = stdev(shares) / len(shares) ** 0.5
    assert error < 0.015 and abs(mean(shares) - expected) < 3 * error


@pytest.mark.slow
def test_the_chosen_cadence_is_close_to_the_best_simulated() -> None:
    times, rate = CheckpointTimes(8.0, 9.0), FailureRate(600.0, 25.0)

    def share(cadence: int) -> float:
        simulated = simulator(cadence, times.copy_s, times.write_s)
        return mean(simulated.run(ONE, poisson(600.0, s), 1, 10**9, 30_000.0).share(STEP_S) for s in range(8))

    chosen = best_cadence(STEP_S, times, rate, 10**9)
    assert 5 < chosen < 15
    assert share(chosen) >= 0.98 * max(share(cadence) for cadence in (1, 2, 4, 6, 8, 9, 10, 12, 16, 24))


@settings(max_examples=12, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 12), st.floats(0, 10), st.floats(0, 40), st.floats(0.1, 0.9))
def test_more_failures_never_keep_more_steps(
    seed: int, cadence: int, copy_s: float, write_s: float, share: float
) -> None:
    random = Random(seed)
    times = [failure.at for failure, _ in zip(poisson(150.0, seed), range(20), strict=False)]
    some = [time for time in times if random.random() < share]
    simulated = simulator(cadence, copy_s, write_s)
    few, many = (simulated.run(ONE, at(*chosen), 1, 10**6, 2000.0) for chosen in (some, times))
    assert many.kept <= few.kept
    for result in (few, many):
        assert result.kept * STEP_S + result.down_s <= 2000.0
        assert result.resumed_at == sorted(result.resumed_at) and result.executed >= result.kept


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 9), st.integers(10, 40))
def test_known_launches_are_not_different(seed: int, cadence: int, n_steps: int) -> None:
    """A simulator that has simulated other runs gives the same results as a new one."""
    used = simulator(cadence)
    for other in range(3):
        used.run(ONE, poisson(150.0, other), 1, 10**6, 1000.0)
    results: list[RunResult] = [
        each.run(ONE, poisson(200.0, seed), 1, n_steps, 5000.0) for each in (used, simulator(cadence))
    ]
    assert results[0] == results[1]
