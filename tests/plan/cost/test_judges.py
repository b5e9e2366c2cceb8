"""The predicted time of judging responses, by hand and against a simulation of every response."""

import heapq
import random
from dataclasses import replace
from pathlib import Path

import pytest

from realhf.api.config import RewardConfig
from realhf.api.execution_plan import Placement
from realhf.api.graph import MFC, InterfaceSpec, Kind
from realhf.api.machine import Cost, RewardLoad
from realhf.apps.prepare.planning import reward_load
from realhf.experiments.ppo_math import PPOMathExperiment
from realhf.plan.cost.judges import judging_cost
from tests.plan.cost.test_cost import cost_model, equal_rows
from tests.plan.search.planners import layout

FUNCTIONS = """
def plain(prompt, response, row): ...
async def waiting(prompt, response, row): ...
"""


def test_rows_divided_by_judges() -> None:
    load = RewardLoad(latency=0.5, processes=4)
    assert judging_cost(load, 16) == Cost(2.0, 8.0)
    assert judging_cost(load, 3) == Cost(0.5, 1.5)  # one response takes as long
    assert judging_cost(load, 0) == Cost(0.0, 0.0)
    assert judging_cost(replace(load, per_process=4, uses_cores=False), 16) == Cost(0.5, 0.0)


@pytest.mark.parametrize("seed", range(30))
def test_the_prediction_is_near_a_simulation(seed: int) -> None:
    chance = random.Random(seed)
    n_rows, processes = chance.randint(64, 400), chance.choice([1, 2, 8, 16])
    latencies = [chance.uniform(0.5, 1.5) for _ in range(n_rows)]
    free = [0.0] * processes
    for latency in latencies:
        heapq.heappush(free, heapq.heappop(free) + latency)
    assert judging_cost(RewardLoad(1.0, processes), n_rows).seconds == pytest.approx(max(free), rel=0.25)


def test_a_reward_call_takes_the_time_of_its_slowest_worker() -> None:
    verifier = MFC("rew", None, Kind.INFERENCE, InterfaceSpec("verifier"), ("tokens",), ("rewards",))
    cost = replace(cost_model(), rewards=RewardLoad(0.25, 2))
    ranks = (*equal_rows(1, n=16), *equal_rows(1, n=8))
    assert cost.compute(verifier, Placement(layout("d2")), ranks) == Cost(2.0, 6.0)
    other = replace(verifier, interface=InterfaceSpec("reward_model"))
    where = Placement(layout("d2"))
    assert cost.compute(other, where, ranks) == cost_model().compute(other, where, ranks)


def load_of(latency: float, **reward: object) -> RewardLoad | None:
    experiment = PPOMathExperiment()
    experiment.reward = RewardConfig(**reward)  # type: ignore[arg-type]
    return reward_load(experiment.graph(), latency)


def test_the_load_follows_from_the_options(tmp_path: Path) -> None:
    file = tmp_path / "rewards.py"
    file.write_text(FUNCTIONS)
    assert load_of(0.0, fn="math") is None
    assert load_of(0.5, fn="none", group_fn="diversity") is None
    assert load_of(0.5, fn="math", processes=3) == RewardLoad(0.5, 3, 1, True)
    assert load_of(0.5, fn=f"{file}:plain", processes=2, max_concurrency=9) == RewardLoad(0.5, 2, 1, True)
    assert load_of(0.5, fn=f"{file}:waiting", processes=2, max_concurrency=9) == RewardLoad(0.5, 2, 9, False)
    assert load_of(0.5, fns=[f"{file}:waiting", "math"], processes=2) == RewardLoad(0.5, 2, 1, True)
    assert load_of(0.5, fn="http://host:1/x?fn=math", processes=8) == RewardLoad(0.5, 8, 1, False)
