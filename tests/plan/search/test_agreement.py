"""The search and the simulator give a plan the same seconds per step, for random experiments, models and clusters."""

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from realhf.plan.search.call_costs import period
from realhf.plan.search.cpp_evaluator import evaluator
from realhf.plan.search.evaluate import PythonEvaluator
from realhf.plan.search.planner import Planner
from tests.plan.search.random_planners import NAMES, random_planner
from tests.plan.search.table_transfers import seconds_with_table_transfers
from tests.scaling import examples

SEEDS = st.integers(0, 1 << 30)


def check_search(planner: Planner, seed: int) -> None:
    found = planner.search(seed)
    assert found.seconds == pytest.approx(planner.predict(found.plan).seconds, rel=1e-9)
    now, others = planner.alternatives(found.plan)
    assert now == pytest.approx(found.seconds, rel=1e-9)
    assert set(others) == {m.name for m in planner.graph.mfcs}


def check_tables(planner: Planner, seed: int) -> None:
    table = planner.candidates([])
    problem, random = planner.problem(table), Random(seed)
    python, compiled = PythonEvaluator(problem), evaluator(problem)
    for _ in range(3):
        choice = tuple(random.randrange(len(options)) for options in problem.table)
        seconds, peak = python.evaluate(choice)
        assert compiled.evaluate(choice) == (seconds, peak)
        assert seconds == pytest.approx(seconds_with_table_transfers(planner, table, problem, choice), rel=1e-9)


@settings(max_examples=examples(10))
@given(SEEDS)
def test_a_search_returns_the_seconds_of_the_simulation(seed: int) -> None:
    check_search(random_planner(seed), seed)


@settings(max_examples=examples(40))
@given(SEEDS)
def test_tables_are_exact_but_for_transfers_of_rows(seed: int) -> None:
    check_tables(random_planner(seed), seed)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_every_experiment_agrees(name: str) -> None:
    for seed in range(examples(5)):
        planner = random_planner(seed, name)
        check_tables(planner, seed)
        check_search(planner, seed)


@given(SEEDS)
@settings(max_examples=examples(50))
def test_costs_of_calls_repeat_with_the_rows(seed: int) -> None:
    planner = random_planner(seed)
    workload = planner.calls.cost.workload
    n = period(workload)
    for position in range(3):
        for rows in (workload.dataset_rows, *([workload.sampled_rows] if workload.is_generated else [])):
            assert [length for _, length in rows(position)] == [length for _, length in rows(position + n)]
