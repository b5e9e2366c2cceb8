"""Bytes and seconds of a checkpoint."""

from dataclasses import replace

import pytest

from realhf.api.execution_plan import ExecutionPlan
from realhf.api.layout import ParallelStrategy
from realhf.api.machine import Link
from realhf.plan.cost.checkpoint import VERIFY_BYTES_PER_S, checkpoint_size, checkpoint_times, restore_seconds
from realhf.plan.cost.cost import CostModel
from realhf.plan.cost.speed import shard_numels
from tests.plan.search.planners import TOY, layout, ppo_planner


def sized(strategy: str, bf16: bool) -> tuple[CostModel, ExecutionPlan]:
    planner = ppo_planner(4, bf16=bf16)
    plan = planner.by_heuristic("megatron")
    placements = {name: replace(placement, layout=layout(strategy)) for name, placement in plan.placements.items()}
    return planner.calls.cost, ExecutionPlan(4, placements)


@pytest.mark.parametrize("bf16, weights, state", [(False, 4, 8), (True, 2, 12)])
@pytest.mark.parametrize("strategy, dp, tp, pp", [("d4t1p1", 4, 1, 1), ("d2t2p1", 2, 2, 1), ("d2t1p2", 2, 1, 2)])
def test_actor_and_critic_are_written_once(
    strategy: str, dp: int, tp: int, pp: int, bf16: bool, weights: int, state: int
) -> None:
    cost, plan = sized(strategy, bf16)
    size = checkpoint_size(cost, plan)
    numels = [shard_numels(cost.models[role], ParallelStrategy(tp=tp, pp=pp)) for role in ("actor", "critic")]
    assert size.total == tp * (weights + state) * sum(map(sum, numels))
    stages = [sum(of_stage) for of_stage in zip(*numels, strict=True)]
    assert size.written == max(stages) * (weights + state / dp)
    assert size.read == max(stages) * (weights + state)


def test_times() -> None:
    cost, plan = sized("d4t1p1", True)
    size, disk = checkpoint_size(cost, plan), Link(1e6, 0.5)
    times = checkpoint_times(cost, size, disk)
    assert times.copy_s == pytest.approx(TOY.host.seconds(size.written))
    assert times.write_s == pytest.approx(0.5 + size.written / 1e6)
    assert restore_seconds(size, disk) == pytest.approx(size.total / VERIFY_BYTES_PER_S + 0.5 + size.read / 1e6)
