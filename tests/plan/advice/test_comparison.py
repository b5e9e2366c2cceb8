"""What decides between two plans."""

from dataclasses import replace

import pytest

from realhf.plan.advice.comparison import deciding_differences, decision_text
from realhf.plan.search.planner import Planner
from tests.plan.search.planners import WIDE, ppo_planner


@pytest.fixture(scope="module")
def planner() -> Planner:
    return ppo_planner(4, actor=WIDE, batch=32)


def test_differences_add_up_to_the_difference_of_the_steps(planner: Planner) -> None:
    plan = planner.by_heuristic("symmetric")
    chosen, (_, others) = planner.predict(plan), planner.alternatives(plan)
    n_compared = 0
    for name, best in others.items():
        assert best is not None
        other = planner.predict(replace(plan, placements={**plan.placements, name: best.placement}))
        found = deciding_differences(name, chosen, other)
        assert found and [abs(s) for _, s in found] == sorted((abs(s) for _, s in found), reverse=True)
        left_out = 4 * 0.1 * abs(found[0][1])
        assert abs(sum(seconds for _, seconds in found) - (other.seconds - chosen.seconds)) <= left_out
        assert decision_text(name, chosen, other).startswith(f"{found[0][0]} {found[0][1]:+.3g} s")
        n_compared += 1
    assert n_compared == len(planner.graph.mfcs)


def test_memory_is_named_if_it_differs(planner: Planner) -> None:
    plan = planner.by_heuristic("symmetric")
    chosen = planner.predict(plan)
    grown = {rank: replace(some, buffers=some.buffers + 2e9) for rank, some in chosen.memory.items()}
    assert decision_text("actor_gen", chosen, replace(chosen, memory=grown)) == "peak memory +2 GB"
    assert decision_text("actor_gen", chosen, chosen) == "no difference"
