"""Published RL steps against a hand computation, and that every point is compared or lacks conditions."""

from dataclasses import replace

import pytest

from benchmarks.bench_published import POINTS, points
from benchmarks.published_engines import RL_ENGINES, VLLM_HOST_ROW
from benchmarks.published_models import model_of
from benchmarks.published_rl import (
    ExpertParallel,
    Point,
    missing,
    n_cached_rows,
    plan_of,
    planner_of,
    ratio,
)
from realhf.api.config.choices import Recompute
from realhf.api.machine import Link
from realhf.arch.flops import forward_flops
from realhf.arch.param_specs import param_specs
from realhf.plan.cost.speed import StageShard, Work
from realhf.plan.machines.roofline import Roofline
from tests.plan.search.planners import COMPUTE_ONLY, LLAMA

STEPS = [point for point in points([POINTS]) if point["kind"] == "rl"]
POINT: Point = {
    "engine": "nemo-rl", "hardware": "h100", "n_gpus": 2, "samples": 64, "train_batch": 32, "max_sequence": 30,
    "mean_new": 20, "mean_total": 30, "steps_off_policy": 0, "generate": {"tp": 1, "pp": 1},
    "train": {"tp": 1, "cp": 1, "ep": 1, "pp": 1}, "train_micro_batch": 1000, "logprob_batch": 1000, "seconds": 10.0,
    "model": {"family": "llama", "layers": 4, "hidden": 64, "heads": 8, "kv_heads": 4, "head_dim": 8,
              "intermediate": 160, "vocab": 120},
}  # fmt: skip
MACHINE = replace(COMPUTE_ONLY, memory=80e9, call=0.0)


def test_every_point_is_compared_or_lacks_conditions() -> None:
    assert len(STEPS) == 39
    reasons = [missing(point) for point in STEPS]
    assert reasons.count("") == 28
    assert sum("ZeRO stage" in reason for reason in reasons) == 8
    assert sum("exchanged in the recipes" in reason for reason in reasons) == 2
    assert sum("do not agree" in reason for reason in reasons) == 1
    for point, reason in zip(STEPS, reasons, strict=True):
        if not reason:
            plan = plan_of(point, RL_ENGINES[point["engine"]])
            used = {rank for placement in plan.placements.values() for rank in placement.layout.mesh.ranks}
            assert used == set(range(point["n_gpus"]))
            assert n_cached_rows(point, RL_ENGINES[point["engine"]]) > 1


def test_seconds_of_a_step() -> None:
    """Two GPUs, each with 32 prompts of 10 tokens and responses of 20; arithmetic, host and refit take time."""
    model, flops, engine = model_of(POINT), MACHINE.flops, RL_ENGINES["nemo-rl"]
    attention = 4 * 4 * 8 * 8  # operations per block, head and pair of tokens
    pairs = 30 * 31 // 2
    faster = 1 - 1 / engine.traits.attention  # of the time that attention takes as matrix products
    forward = 32 * (forward_flops(model, [30]) - faster * attention * pairs)
    logprobs = 2 * forward
    head = 2 * 64 * 120
    # backward: twice the products, 2.5 times the attention, and the logits again; two mini-batches of 16 rows
    backward = 2 * forward + 32 * (0.5 * attention * pairs / engine.traits.attention + 30 * head)
    prefill = 32 * (forward_flops(model, [10], head_tokens=0) - faster * attention * 55 + head)
    matrices = forward_flops(model, [1]) - attention
    decode = 32 * 19 * (matrices + attention * 20.5)  # 19 steps; from 11 to 30 cached tokens
    host = VLLM_HOST_ROW * 32 * (19 + 1)
    refit = 2 * sum(spec.numel for spec in param_specs(model)) / engine.refit.bandwidth
    seconds = (logprobs + forward + backward + prefill + decode) / flops + host + refit
    planner, plan = planner_of(POINT, MACHINE, 1.0)
    assert planner.predict(plan).seconds == pytest.approx(seconds, rel=1e-6)
    assert ratio(POINT, MACHINE, 1.0) == planner.predict(plan).seconds / 10.0


def test_asynchronous_steps_generate_on_other_gpus() -> None:
    """Generation of the next step and training overlap, so a step takes the longer of both."""
    ahead = {**POINT, "n_gpus": 4, "n_gpus_generate": 2, "steps_off_policy": 1}
    planner, plan = planner_of(ahead, MACHINE, 1.0)
    assert set(plan["actor_gen"].layout.mesh.ranks) == {2, 3}
    assert set(plan["actor_train"].layout.mesh.ranks) == {0, 1}
    timeline = planner.predict(plan).timeline
    generation = max(a.end - a.start for a in timeline.activities if a.mfc == "actor_gen")
    assert timeline.seconds_per_step == pytest.approx(generation, rel=1e-6)


def test_points_that_lack_conditions() -> None:
    assert missing(POINT) == ""
    assert "GPUs that generate" in missing({**POINT, "steps_off_policy": 1})
    assert "micro-batches" in missing({name: value for name, value in POINT.items() if name != "train_micro_batch"})
    assert missing({**POINT, "unreliable": "a reason"}) == "a reason"


def test_the_cache_limits_the_rows_that_decode() -> None:
    """60 % of a GPU without the weights, or 80 % of one that only generates, in rows of 30,000 tokens."""
    numel = sum(spec.numel for spec in param_specs(model_of(POINT)))
    engine, long = RL_ENGINES["nemo-rl"], {**POINT, "mean_total": 30_000}
    per_row, memory = 30_000 * 4 * 2 * 4 * 8 * 2, 81559 * 2**20
    assert n_cached_rows(long, engine) == (0.6 * memory - 2 * numel) // per_row
    assert n_cached_rows({**long, "steps_off_policy": 1}, engine) == (0.8 * memory - 2 * numel) // per_row
    assert n_cached_rows({**long, "mean_total": 10**9}, engine) == 1


def test_expert_parallel_passes_exchange_tokens() -> None:
    """Two ranks: half of the tokens' hidden states are sent, twice per block and pass."""
    model = replace(LLAMA, n_experts=8, experts_per_token=2, expert_intermediate=48)
    machine, work = replace(COMPUTE_ONLY, node=Link(1e9)), Work.of([50, 20])
    shard = StageShard(model, 1, 4, True, True, True, Recompute.full)
    alone, both = Roofline(machine), ExpertParallel(machine, ep=2)
    exchanges = 4 * 2 * (70 * 64 * 2 * 2 / 2) / 1e9
    router = 4 * 2 * 70 * 64 * 4 / machine.flops  # of the other rank's four experts
    assert both.forward(shard, work, (0,)) == pytest.approx(alone.forward(shard, work, (0,)) + exchanges - router)
    (f, b), (f2, b2) = alone.train(shard, work, (0,)), both.train(shard, work, (0,))
    assert f2 - f == pytest.approx(exchanges - router)
    assert b2 - b == pytest.approx(2 * exchanges - 3 * router)
