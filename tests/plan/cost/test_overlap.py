"""Communication during backward passes: exposed seconds by hand, and agreement with the engine."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from realhf.api.config import ModelSpec
from realhf.api.config.choices import Backend
from realhf.api.execution_plan import MicroBatching, Placement
from realhf.api.experiment import RoleSpec
from realhf.api.layout import Coord, ParallelStrategy
from realhf.api.machine import Link
from realhf.api.model_config import Lora
from realhf.arch.lora import own_specs
from realhf.comm.process_groups import ParallelContext
from realhf.models.engine import grad_reduction
from realhf.models.engine.native import empty_shard
from realhf.models.engine.optimizer import SharedGradients
from realhf.plan.cost.cost import CostModel
from realhf.plan.cost.overlap import (
    BUCKET_NUMEL,
    exposed_reduction,
    exposed_tp_backward,
    is_summed,
    numel_after_backward,
    overlaps_grad_reduce,
)
from realhf.plan.cost.speed import StageShard, shard_numels
from realhf.plan.machines.roofline import recomputed_numel, saved_activation_numel
from tests.plan.cost.test_cost import equal_rows
from tests.plan.search.planners import FREE, LLAMA, TOY, layout, ppo_planner

SECONDS = st.floats(0, 10)


def test_a_reduction_by_hand() -> None:
    """Four blocks of one second: the reduction starts after one, the last quarter can only start at the end."""
    assert exposed_reduction(2.0, 0.25, 4.0, 4) == 0.5
    assert exposed_reduction(8.0, 0.25, 4.0, 4) == 3.0 + 2.0
    assert exposed_reduction(2.0, 0.25, 0.0, 4) == 2.0
    assert exposed_reduction(2.0, 1.0, 4.0, 1) == 2.0


@given(SECONDS, st.floats(0, 1), SECONDS, st.integers(1, 100))
def test_a_reduction_is_hidden_at_most_by_the_pass(seconds: float, last: float, backward: float, n: int) -> None:
    exposed = exposed_reduction(seconds, last, backward, n)
    assert max(last * seconds, seconds - backward) - 1e-9 <= exposed <= seconds + 1e-9


def shard(sequence: bool = False, overlaps: bool = True, tp: int = 2) -> StageShard:
    return StageShard(LLAMA, tp, 4, True, True, False, None, sequence, overlaps)


def test_tensor_parallel_collectives_by_hand() -> None:
    assert exposed_tp_backward((1.0, 3.0), 2.0, 1.0, 1.0, shard(tp=1)) == 0.0
    assert exposed_tp_backward((1.0, 3.0), 2.0, 1.0, 1.0, shard(overlaps=False)) == 4.0
    assert exposed_tp_backward((1.0, 3.0), 2.0, 1.5, 0.5, shard(sequence=True, overlaps=False)) == 4.0
    assert exposed_tp_backward((1.0, 3.0), 2.0, 1.0, 1.0, shard()) == 1.0
    # the first layer's gathering exceeds its product by 0.5; each row-parallel layer gathers for 1.5
    assert exposed_tp_backward((1.0, 3.0), 2.0, 1.5, 0.5, shard(sequence=True)) == 0.5 + 2 * 1.5


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("text", ["t2", "t8", "t2p2", "d2p4", "d2"])
@pytest.mark.parametrize("lora", [False, True])
def test_gradients_that_workers_sum_are_those_of_the_engine(text: str, sequence: bool, lora: bool) -> None:
    config = replace(LLAMA, tied_embedding=True, qk_norm="head", lora=Lora(4, 8.0) if lora else None)
    where = layout(text)
    params = empty_shard(config, where, where.mesh.ranks[0], torch.float32, "meta")
    shared = SharedGradients(params, ParallelContext(where, where.mesh.ranks[0]), sequence and where.strategy.tp > 1)
    names = {spec.name for spec in own_specs(config) if spec.name in params.names}
    found = {spec.name for spec in own_specs(config) if is_summed(spec, where.strategy, sequence)}
    assert found & names == shared.names


def test_the_buckets_after_the_pass_are_those_of_the_engine() -> None:
    assert BUCKET_NUMEL == grad_reduction.BUCKET_NUMEL
    for text in ("d2", "d2t2", "d2p2", "d2t2p2"):
        where = layout(text)
        for stage in range(where.strategy.pp):
            rank = where.rank(Coord(stage, 0, 0))
            params = empty_shard(LLAMA, where, rank, torch.float32, "meta")
            late = SharedGradients(params, ParallelContext(where, rank), where.strategy.tp > 1).names
            ranges = [
                grad_reduction.ParamRange(*(span.start, span.stop), params.spec(name).layer, name in late)
                for name in params.names
                if (span := params.span(name))
            ]
            buckets = grad_reduction.plan_buckets(ranges, params.data.numel() // where.strategy.dp, 1)
            first = min(max(bucket.layer, 1) for bucket in buckets)  # with buckets of single elements
            after = sum(bucket.stop - bucket.start for bucket in buckets if bucket.is_late or bucket.layer <= first)
            assert numel_after_backward(LLAMA, where.strategy, stage, True) == after


def train_seconds(overlap: bool | None, bandwidth: float, text: str = "d4", **spec: object) -> float:
    """Return the seconds of a training call with one micro-batch on links of this bandwidth."""
    hardware = replace(TOY, memory_bandwidth=FREE, kernel=0.0, node=Link(bandwidth))
    cost: CostModel = ppo_planner(hardware=hardware, overlap_grad_reduce=overlap, **spec).calls.cost
    placement = Placement(layout(text), MicroBatching(max_tokens_per_mb=4096))
    rows = equal_rows(placement.layout.strategy.dp, minibatches=1)
    mfc = replace(cost.graph["actor_train"], n_minibatches=1)
    return cost.compute(mfc, placement, rows).seconds


def test_overlapped_reduction_is_priced_where_the_engine_overlaps() -> None:
    numel = shard_numels(LLAMA, ParallelStrategy())[0]
    fast = 4 * numel / 1e-5  # the whole reduction takes 10 us, less than the pass
    last = numel_after_backward(LLAMA, layout("d4").strategy, 0, True)
    serial, overlapped = train_seconds(False, fast), train_seconds(True, fast)
    # a reduce-scatter moves three quarters of the data, reductions to single ranks all of it
    assert serial - overlapped == pytest.approx(0.75e-5 - last / numel * 1e-5, rel=1e-3)
    assert train_seconds(None, fast) == serial  # the default depends on the device, which the planner resolves
    assert train_seconds(True, fast, "t4") == train_seconds(False, fast, "t4")
    slow = 4 * numel / 1.0
    assert train_seconds(True, slow) == pytest.approx(1.0 + 0.75, abs=1e-3)  # hidden by less than 1 ms; all-gather


def test_megatron_and_single_replicas_do_not_overlap() -> None:
    spec = ModelSpec(overlap_grad_reduce=True)
    assert overlaps_grad_reduce(RoleSpec(spec), layout("d2").strategy)
    assert not overlaps_grad_reduce(RoleSpec(spec), layout("t2").strategy)
    assert not overlaps_grad_reduce(RoleSpec(replace(spec, backend=Backend.megatron)), layout("d2").strategy)
    assert not overlaps_grad_reduce(RoleSpec(replace(spec, overlap_grad_reduce=None)), layout("d2").strategy)


def test_saved_inputs_are_sharded_only_with_overlap() -> None:
    shards = [shard(*args) for args in ((False, False), (False, True), (True, False), (True, True))]
    assert [one.input_shards for one in shards] == [1, 1, 1, 2]
    whole, divided = (saved_activation_numel(LLAMA, 2, True, one.input_shards) for one in shards[2:])
    assert whole - divided == 128 - 64
    assert recomputed_numel(LLAMA, 2, 1) - recomputed_numel(LLAMA, 2, 2) == 128 - 64
