"""Searches for the least memory."""

from dataclasses import replace

import pytest

from realhf.plan.advice.goals import SLACK, least_memory
from realhf.plan.compile.heuristic import HEURISTICS
from tests.plan.search.planners import TOY, WIDE, ppo_planner

LARGE = replace(TOY, memory=1e11)


@pytest.mark.parametrize("n_workers", [1, 4])
def test_the_least_memory_is_below_that_of_heuristics_and_of_the_fastest_plan(n_workers: int) -> None:
    planner = ppo_planner(n_workers, LARGE, WIDE, 256)
    found, fastest = least_memory(planner), planner.search()
    peak = planner.predict(found.plan).peak
    others = [fastest.plan, *(planner.by_heuristic(name) for name in HEURISTICS)]
    assert peak <= SLACK * min(planner.predict(plan).peak for plan in others) * (1 + 1e-9)
    assert peak < planner.predict(fastest.plan).peak
    assert found.result.seconds >= 0 and found.plan.n_workers == n_workers


def test_the_result_is_reproducible() -> None:
    planner = ppo_planner(2, actor=WIDE)
    assert least_memory(planner, seed=3).plan == least_memory(planner, seed=3).plan
