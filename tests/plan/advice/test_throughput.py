"""Tokens, FLOPs and price of a step."""

import pytest

from realhf.api.machine import Workload
from realhf.arch.flops import forward_flops, generate_flops, train_flops
from realhf.plan.advice.throughput import StepWork, economy, step_work
from tests.plan.search.planners import LLAMA, ppo_planner


def test_work_of_a_step_of_ppo() -> None:
    planner = ppo_planner(4, workload=Workload(((10,), (20,)), (5, 7)), batch=4)
    work = step_work(planner.calls, planner.graph.mfcs)
    rows = [15, 27, 15, 27]
    assert (work.tokens, work.word) == (sum(rows), "trained")
    models = planner.calls.cost.models
    expected = generate_flops(LLAMA, [10, 20, 10, 20], rows)
    expected += sum(forward_flops(models[role], rows) for role in ("rew", "ref", "critic"))
    expected += sum(train_flops(models[role], rows) for role in ("actor", "critic"))
    assert work.flops == expected


def test_samples_count_and_generation_alone_counts_new_tokens() -> None:
    planner = ppo_planner(4, workload=Workload(((10,),), (5, 7), 2), batch=3)
    assert step_work(planner.calls, planner.graph.mfcs).tokens == 3 * (15 + 17)
    gen = tuple(m for m in planner.graph.mfcs if m.name == "actor_gen")
    assert step_work(planner.calls, gen) == StepWork(3 * 12, "generated", generate_flops(LLAMA, [10] * 3, [15, 17] * 3))
    inference = tuple(m for m in planner.graph.mfcs if m.name == "ref_inf")
    assert step_work(planner.calls, inference).word == "read"


def test_economy() -> None:
    found = economy(StepWork(1000, "trained", 6e12), 2.0, 4, 1e12, 3.0)
    assert (found.tokens_per_s, found.tokens_per_s_per_worker, found.mfu) == (500.0, 125.0, 0.75)
    assert found.worker_hours == pytest.approx(8 / 3600) and found.dollars == pytest.approx(24 / 3600)
    assert economy(StepWork(1, "read", 1.0), 1.0, 1, 0.0, 0.0).mfu == 0.0
