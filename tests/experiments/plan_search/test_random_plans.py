"""Random plans are valid, distinct and fit in memory."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.plan_search.random_plans import random_plans
from realhf.plan.compile.check import strategy_problems
from tests.plan.search.planners import TOY, ppo_planner


@settings(max_examples=15)
@given(st.integers(0, 10**6))
def test_plans_are_distinct_valid_and_fit(seed: int) -> None:
    planner = ppo_planner()
    excluded = random_plans(planner, 2, seed)
    plans = random_plans(planner, 4, seed, excluded)
    assert len({repr(plan) for plan in [*plans, *excluded]}) == 6
    for plan in plans:
        assert plan.placements.keys() == {mfc.name for mfc in planner.graph.mfcs}
        assert planner.fits(plan)
        for mfc in planner.graph.mfcs:
            layout = plan[mfc.name].layout
            assert set(layout.mesh.ranks) <= set(range(4)) and len(layout.mesh.ranks) == layout.strategy.world
            assert mfc.role and not strategy_problems(planner.calls.cost.models[mfc.role], layout.strategy)


def test_the_same_seed_draws_the_same_plans() -> None:
    first, again, other = (random_plans(ppo_planner(), 3, seed) for seed in (1, 1, 2))
    assert first == again
    assert first != other


def test_too_few_plans_are_an_error() -> None:
    with pytest.raises(ValueError, match="only 1 of 2 random plans"):  # one worker has one layout
        random_plans(ppo_planner(n_workers=1), 2, 1)
    with pytest.raises(ValueError, match="only 0 of 1"):  # no memory
        random_plans(ppo_planner(hardware=replace(TOY, memory=2e6)), 1, 1)
