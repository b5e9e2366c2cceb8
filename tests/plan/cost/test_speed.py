"""Stages and shards add up to the model."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from realhf.api.config import ModelSpec, Recompute
from realhf.api.experiment import RoleSpec
from realhf.api.layout import ParallelStrategy
from realhf.api.model_config import ModelConfig
from realhf.arch.param_specs import param_specs, stage_layers
from realhf.plan.compile.realloc import shard_boxes
from realhf.plan.cost.speed import StageShard, chunk_shards, shard_numels, slowest_of, stage_shards
from tests.plan.search.planners import LLAMA, layout
from tests.scaling import examples

MOE = replace(LLAMA, n_experts=4, experts_per_token=2, expert_intermediate=48, dense_layers=(0,))
STRATEGIES = ("d1", "t2", "t4", "t8", "p2", "p3", "p4", "t2p2", "t4p3", "p2v2", "t2p2v2")


@pytest.mark.parametrize("model", [LLAMA, replace(LLAMA, tied_embedding=True), MOE])
@pytest.mark.parametrize("text", STRATEGIES)
def test_shard_numels_equal_those_of_the_first_rank_of_every_stage(text: str, model: ModelConfig) -> None:
    where, specs = layout(text), param_specs(model)
    strategy = where.strategy
    expected = []
    for stage in range(strategy.pp):
        boxes = shard_boxes(specs, partial(stage_layers, model), where, where.mesh.ranks[stage * strategy.tp])
        sizes = []
        for box in boxes.values():
            numel = 1
            for start, stop in box:
                numel *= stop - start
            sizes.append(numel)
        expected.append(sum(sizes))
    assert shard_numels(model, strategy) == tuple(expected)


@settings(max_examples=examples(60))
@given(st.integers(1, 12), st.data())
def test_stages_partition_all_blocks(n_layers: int, data: st.DataObject) -> None:
    model, pp = replace(LLAMA, n_layers=n_layers), data.draw(st.integers(1, n_layers))
    spec = ModelSpec(bf16=True, gradient_checkpointing=True)
    parts = stage_shards(model, RoleSpec(spec), ParallelStrategy(2, 2, pp))
    assert sum(part.n_blocks for part in parts) == n_layers and min(part.n_blocks for part in parts) >= 1
    assert [part.first for part in parts] == [True] + [False] * (pp - 1)
    assert [part.last for part in parts] == [False] * (pp - 1) + [True]
    assert all(
        (part.tp, part.bf16, part.recompute, part.sequence_parallel) == (2, True, Recompute.full, True)
        for part in parts
    )
    vpp = data.draw(st.integers(1, n_layers // pp)) if pp > 1 else 1
    strategy = ParallelStrategy(2, 2, pp, vpp=vpp)
    parts, chunks = (some(model, RoleSpec(spec), strategy) for some in (stage_shards, chunk_shards))
    assert [part.n_blocks for part in parts] == [sum(c.n_blocks for c in chunks[s::pp]) for s in range(pp)]
    assert [chunk.first for chunk in chunks] == [True] + [False] * (pp * vpp - 1)
    assert [part.last for part in parts] == [False] * (pp - 1) + [True] and chunks[-1].last
    assert sum(shard_numels(model, ParallelStrategy(pp=pp))) == sum(spec.numel for spec in param_specs(model))


def test_sequence_parallelism_needs_a_group() -> None:
    (alone,) = stage_shards(LLAMA, RoleSpec(ModelSpec()), ParallelStrategy())
    (off,) = stage_shards(LLAMA, RoleSpec(ModelSpec(sequence_parallel=False)), ParallelStrategy(tp=2))
    assert not alone.sequence_parallel and not off.sequence_parallel


def test_kv_cache_of_local_heads() -> None:
    whole = StageShard(LLAMA, 1, 4, first=True, last=True, bf16=False, recompute=False)
    assert whole.kv_numel == 2 * 4 * 4 * 8
    assert replace(whole, tp=2).kv_numel == 2 * 4 * 2 * 8
    assert replace(whole, tp=8).kv_numel == 2 * 4 * 1 * 8  # four heads on eight ranks: each has one


@settings(max_examples=examples(20), deadline=None)
@given(st.integers(1, 300), st.floats(0.0, 0.3), st.integers(0, 99))
def test_the_slowest_of_several_equals_a_simulation(n: int, jitter: float, seed: int) -> None:
    times = 1 + jitter * np.random.default_rng(seed).standard_normal((4000, n))
    assert slowest_of(n, jitter) == pytest.approx(times.max(1).mean(), abs=0.06 * jitter + 1e-12)
    assert slowest_of(1, jitter) == 1.0
