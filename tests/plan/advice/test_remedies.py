"""Single steps that lower memory, and the bound below which no layout fits."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from realhf.api.execution_plan import ExecutionPlan, Placement
from realhf.api.layout import Layout
from realhf.plan.advice.remedies import (
    SAME_NUMERICS,
    Step,
    changed_options,
    larger_clusters,
    may_fit,
    with_cluster,
)
from realhf.plan.compile.check import layouts
from realhf.plan.search.planner import Planner
from tests.plan.search.planners import TOY, WIDE, ppo_planner

PLANNER = ppo_planner(4, TOY, WIDE, 32)
LAYOUTS = layouts(4, 4, WIDE)


def plan_of(planner: Planner, chosen: list[Layout]) -> ExecutionPlan:
    limits = planner.calls.limits
    placements = {name: Placement(layout, limits[name]) for name, layout in zip(limits, chosen, strict=True)}
    return ExecutionPlan(planner.n_workers, placements)


CHOICES = st.lists(st.sampled_from(LAYOUTS), min_size=len(PLANNER.graph.mfcs), max_size=len(PLANNER.graph.mfcs))


@given(st.floats(3e7, 3e9), CHOICES)
def test_no_layout_fits_if_the_bound_excludes_it(memory: float, chosen: list[Layout]) -> None:
    calls = replace(PLANNER.calls, hardware=replace(TOY, memory=memory))
    planner = replace(PLANNER, calls=calls)
    assert may_fit(planner) or not planner.fits(plan_of(planner, chosen))


def test_the_bound_excludes_small_memories() -> None:
    found = [may_fit(replace(PLANNER, calls=replace(PLANNER.calls, hardware=replace(TOY, memory=memory))))
             for memory in (1e8, 1e10)]  # fmt: skip
    assert found == [False, True]


@given(CHOICES)
def test_steps_lower_memory(chosen: list[Layout]) -> None:
    peak = PLANNER.predict(plan_of(PLANNER, chosen)).peak
    for step in SAME_NUMERICS:
        changed = step(PLANNER)
        after = changed.predict(plan_of(changed, chosen)).memory
        # loading offloaded weights during a call may coincide with the peak of another role
        assert max(some.total for some in after.values()) <= 1.001 * peak or "offload" in step.__name__


@pytest.mark.parametrize(
    ("step", "words"),
    [
        (SAME_NUMERICS[1], ["actor.gradient_checkpointing=True", "critic.gradient_checkpointing=True",
                            "actor.recompute_granularity=selective", "critic.recompute_granularity=selective"]),
        (SAME_NUMERICS[2], ["actor.gradient_checkpointing=True", "critic.gradient_checkpointing=True"]),
        (SAME_NUMERICS[3], ["gen.max_num_seqs=8"]),
        (SAME_NUMERICS[5], ["actor.optimizer.offload=True", "critic.optimizer.offload=True"]),
    ],
)  # fmt: skip
def test_options_of_steps(step: Step, words: list[str]) -> None:
    assert changed_options(PLANNER, step(PLANNER), "gen.max_num_seqs") == words


def test_nothing_is_offloaded_on_cpu_where_memory_is_shared() -> None:
    planner = ppo_planner(2, device="cpu")
    assert SAME_NUMERICS[4](planner) is planner and SAME_NUMERICS[5](planner) is planner


def test_larger_clusters() -> None:
    assert larger_clusters(ppo_planner(2, replace(TOY, node_size=2)))[:5] == [(1, 4), (1, 8), (2, 8), (3, 8), (4, 8)]
    of_nodes = larger_clusters(ppo_planner(16, replace(TOY, node_size=8)))
    assert of_nodes[:5] == [(3, 8), (4, 8), (6, 8), (8, 8), (12, 8)] and of_nodes[-1] == (128, 8)
    changed = with_cluster(PLANNER, 6, 8)
    assert changed.n_workers == 48 and changed_options(PLANNER, changed, "") == ["n_nodes=6 n_gpus_per_node=8"]
    assert larger_clusters(ppo_planner(4, replace(TOY, cores=2))) == []
