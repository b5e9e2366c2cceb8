"""Entry points of the planner end with a result for any experiment, model, cluster and memory."""

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from realhf.api.machine import Hardware
from realhf.plan.advice.suggest_fix import out_of_memory_message
from realhf.plan.compile.heuristic import HEURISTICS
from realhf.plan.search.planner import Planner
from tests.plan.search.planners import TOY
from tests.plan.search.random_planners import random_planner
from tests.scaling import examples


def sized_planner(seed: int, most_nodes: int) -> Planner:
    """Return a planner for a cluster of any size, on which memory may be too small for every plan."""
    random = Random(seed)
    machine: Hardware = replace(TOY, node_size=random.randint(1, 9), memory=TOY.memory * 10.0 ** random.uniform(-2, 1))
    if random.random() < 0.3:
        machine = replace(machine, cores=random.randint(1, machine.node_size))
    planner = random_planner(seed, hardware=machine, n_workers=machine.node_size * random.randint(1, most_nodes))
    return replace(planner, max_evaluations=random.choice((0, 1, 300)))


def check_entry_points(planner: Planner, seed: int, budget_s: float = 60.0) -> None:
    found = planner.search(seed, budget_s)
    assert found.seconds == planner.predict(found.plan).seconds > 0
    plans = {rule: planner.by_heuristic(rule) for rule in HEURISTICS}
    assert planner.fits(found.plan) >= any(planner.fits(plan) for plan in plans.values())
    for plan in (found.plan, *plans.values()):
        assert set(plan.placements) == {m.name for m in planner.graph.mfcs} and plan.n_workers == planner.n_workers
        prediction = planner.predict(plan)
        if not planner.fits(plan):
            message = out_of_memory_message(planner, plan, prediction, lambda p: p.by_heuristic("symmetric"), "slots")
            assert "would need" in message
    now, others = planner.alternatives(plan)
    assert now == prediction.seconds and set(others) == set(plan.placements)


@settings(max_examples=examples(5))
@given(st.integers(0, 1 << 30))
def test_any_small_cluster(seed: int) -> None:
    check_entry_points(sized_planner(seed, 2), seed)


@pytest.mark.slow
@settings(max_examples=examples(6))
@given(st.integers(0, 1 << 30))
def test_any_cluster(seed: int) -> None:
    check_entry_points(sized_planner(seed, 9), seed)


def test_a_search_without_time_returns_a_plan() -> None:
    for seed in range(5):
        check_entry_points(sized_planner(seed, 2), seed, budget_s=0.0)
