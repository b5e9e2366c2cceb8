"""Time and memory of ZeRO-2 and ZeRO-3 against hand computations."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from realhf.api.execution_plan import MicroBatching, Placement
from realhf.api.layout import ParallelStrategy
from realhf.api.machine import Link
from realhf.arch.param_specs import param_specs
from realhf.plan.cost.cost import NO_COST
from realhf.plan.cost.speed import CollectiveKind
from realhf.plan.cost.zero import NO_LAYERS, LayerCollectives, PerLayer, layer_numels
from realhf.plan.machines.roofline import Roofline
from tests.plan.cost.test_cost import cost_model, seconds
from tests.plan.cost.test_memory import NUMEL, memory_model, rows
from tests.plan.search.planners import COMPUTE_ONLY, LLAMA, TOY, layout, ppo_planner

SECONDS = st.floats(0, 10)
LAYERS = st.builds(PerLayer, SECONDS, SECONDS, SECONDS)


def test_numbers_of_parameters_by_layer() -> None:
    tied = replace(LLAMA, tied_embedding=True)
    for config in (LLAMA, tied):
        (whole,) = layer_numels(config, ParallelStrategy())
        copies = config.vocab * config.hidden if config is tied else 0
        total = sum(spec.numel for spec in param_specs(config))
        assert whole.embedding + config.n_layers * whole.block + whole.head == total + copies
    first, last = layer_numels(tied, ParallelStrategy(tp=2, pp=2))
    assert first.head == last.embedding == 0 and first.embedding == 60 * 64 and last.head == 60 * 64 + 64


def test_compute_hides_gathering_of_later_layers() -> None:
    fast = LayerCollectives(PerLayer(1, 2, 3), PerLayer(4, 5, 6))
    assert fast.overlapped(400.0, 800.0, 4) == (400 + 1 + 2, 800 + 5 + 4)  # the first to wait for, the last to reduce
    assert fast.overlapped(0.0, 0.0, 4) == (1 + 2 + 3 * 2 + 3, 0.0)
    assert fast.overlapped(4.0, 4.0, 4)[1] == (2 + 6) + 3 * (2 + 5) + 5 + 4
    assert fast.total(4, trains=True) == (1 + 8 + 3) + 8 + (4 + 20 + 6)
    assert fast.total(4, trains=False) == 1 + 8 + 3


@given(LAYERS, LAYERS, SECONDS, SECONDS, st.integers(1, 80))
def test_overlapped_passes_are_between_computation_and_the_sum(
    gather: PerLayer, reduce: PerLayer, forward: float, backward: float, n: int
) -> None:
    some = LayerCollectives(gather, reduce)
    found = sum(some.overlapped(forward, backward, n))
    assert found >= (forward + backward) * (1 - 1e-9)
    assert found <= (forward + backward + some.total(n, trains=True)) * (1 + 1e-9) + gather.block
    assert LayerCollectives(NO_LAYERS, NO_LAYERS).overlapped(forward, backward, n) == pytest.approx((forward, backward))


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_training_call_pays_for_what_is_moved(stage: int) -> None:
    """On links that are slow in comparison with compute, every collective counts."""
    slow = replace(COMPUTE_ONLY, node=Link(1e6, 0.0))
    cost, text, speed, ranks = (
        cost_model(slow, zero_stage=stage),
        "d2z3" if stage == 3 else "d2",
        Roofline(slow),
        (0, 1),
    )
    (numels,) = layer_numels(LLAMA, ParallelStrategy())
    gather = speed.collective(CollectiveKind.ALL_GATHER, 4 * NUMEL, ranks)
    reduce = speed.collective(CollectiveKind.REDUCE_SCATTER, 4 * NUMEL, ranks)
    blocks = speed.collective(CollectiveKind.ALL_GATHER, 4 * LLAMA.n_layers * numels.block, ranks)
    expected = {1: reduce + gather, 2: reduce + gather, 3: gather + blocks + reduce}[stage]
    found = seconds(cost, "actor_train", text) / 2  # mini-batches, of one micro-batch each
    assert found == pytest.approx(expected, rel=0.05)
    assert seconds(cost_model(TOY, zero_stage=stage), "actor_train", text) > 0


def test_ranks_without_rows_take_no_time_in_a_pass() -> None:
    cost = cost_model(zero_stage=3)
    where = Placement(layout("d2z3"), MicroBatching())
    assert cost._passes(cost.graph["actor_train"], where, 0, ((), ())) == NO_COST


def test_forward_passes_gather_only_in_a_sharded_layout() -> None:
    cost = cost_model(replace(COMPUTE_ONLY, node=Link(1e6, 0.0)), zero_stage=2)
    assert seconds(cost, "ref_inf", "d2z3") > 10 * seconds(cost, "ref_inf", "d2")


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_resident_bytes_are_shared_by_stage(stage: int, bf16: bool) -> None:
    strategy = layout("d4z3" if stage == 3 else "d4").strategy
    found = memory_model(bf16=bf16, zero_stage=stage).resident("actor", strategy)
    assert found.weights == (2 if bf16 else 4) * NUMEL / (4 if stage == 3 else 1)
    assert found.gradients == 4 * NUMEL / (4 if stage > 1 else 1)
    assert found.optimizer == (12 if bf16 else 8) * NUMEL / 4


def test_layers_of_a_pass_are_transient() -> None:
    (numels,) = layer_numels(LLAMA, ParallelStrategy())
    one, two, three = (memory_model(zero_stage=stage) for stage in (1, 2, 3))
    train = one.graph["actor_train"]

    def buffers(model: object, text: str, mfc: object = train) -> float:
        where = Placement(layout(text), MicroBatching())
        return model.transient(mfc, where, [rows(2)] * 2, where.layout).buffers  # type: ignore[attr-defined]

    plain = buffers(one, "d2")
    assert buffers(two, "d2") - plain == 8 * numels.largest
    assert buffers(three, "d2z3") - plain == 8 * numels.largest + 4 * (numels.largest + numels.block)
    ref = one.graph["ref_inf"]
    assert buffers(one, "d2z3", ref) - buffers(one, "d2", ref) == 4 * (numels.largest + numels.block)


def test_other_calls_borrow_whole_weights() -> None:
    planner = ppo_planner(zero_stage=3)
    plan = planner.by_heuristic("symmetric")
    assert {str(plan[m.name].layout.strategy) for m in planner.graph.mfcs if m.is_train} == {"d4t1p1z3"}
    assert {str(plan[m.name].layout.strategy) for m in planner.graph.mfcs if not m.is_train} == {"d4t1p1"}
    peaks = [max(b.total for b in planner.predict(plan).memory.values())]
    assert planner.search(budget_s=20.0).plan.n_workers == 4
    where = plan["actor_gen"]
    found = planner.calls.memory.transient(planner.graph["actor_gen"], where, [rows(2)] * 4, plan["actor_train"].layout)
    assert found.borrowed == 4 * NUMEL and peaks[0] > 0
