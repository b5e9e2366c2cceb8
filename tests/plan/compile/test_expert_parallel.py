"""Layouts that divide experts: boxes, reallocation at the lower bound, legal degrees, and what calls can have."""

from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from realhf.api.config import ModelSpec
from realhf.api.config.choices import Backend
from realhf.api.experiment import RoleSpec
from realhf.api.graph import MFC, InterfaceSpec, Kind
from realhf.api.layout import AXES, DeviceMesh, Layout, ParallelStrategy, expert_degrees
from realhf.api.param_box import box_numel
from realhf.arch.param_specs import param_specs, stage_layers
from realhf.plan.compile.call_degrees import expert_layouts, expert_problem, of_call
from realhf.plan.compile.check import nearest_strategy, strategy_problems
from realhf.plan.compile.realloc import shard_boxes
from tests.plan.compile.test_realloc import CONFIG, check
from tests.scaling import examples

ROUTED = replace(CONFIG, n_layers=4, dense_layers=(0,), n_experts=5, experts_per_token=2, expert_intermediate=8,
                 expert_bias=True, shared_intermediate=8)  # fmt: skip
STAGES = partial(stage_layers, ROUTED)


def strategies(world: int = 8) -> list[ParallelStrategy]:
    """Return all strategies on up to ``world`` workers, with all degrees of expert parallelism up to 5."""
    plain = [ParallelStrategy(dp, tp, pp, vpp=vpp) for pp, vpp in ((1, 1), (2, 1), (2, 2)) for tp in (1, 2, 4)
             for dp in range(1, world + 1) if dp * tp * pp <= world]  # fmt: skip
    found = []
    for strategy in plain:
        found += [replace(strategy, ep=ep) for ep in expert_degrees(strategy.dp, strategy.tp)]
    return [strategy for strategy in found if strategy.ep <= ROUTED.n_experts]


EVERY = strategies()
SHARDED = [replace(strategy, ep=1, zero3=True) for strategy in EVERY if strategy.dp > 1 and strategy.ep == 1]


@settings(max_examples=examples(320))
@given(st.data())
def test_reallocation_at_the_lower_bound(data: st.DataObject) -> None:
    """Of random pairs, one layout divides experts; the other one is any, also with ZeRO-3. Meshes are random."""
    divided = st.sampled_from([strategy for strategy in EVERY if strategy.ep > 1])
    pairs = st.tuples(divided, st.sampled_from(EVERY + SHARDED)).flatmap(st.permutations)
    layouts = []
    for strategy in data.draw(pairs):
        ranks = data.draw(st.permutations(range(data.draw(st.integers(8, 10)))))[: strategy.world]
        layouts.append(Layout(DeviceMesh(tuple(ranks)), strategy))
    check(*layouts, specs=param_specs(ROUTED), stages=STAGES)


@pytest.mark.parametrize("strategy", EVERY, ids=str)
def test_every_element_of_an_expert_is_on_as_many_workers_as_replicas(strategy: ParallelStrategy) -> None:
    layout = Layout(DeviceMesh(tuple(range(strategy.world))), strategy)
    held = dict.fromkeys((spec.name for spec in param_specs(ROUTED)), 0)
    for rank in layout.mesh.ranks:
        for name, box in shard_boxes(param_specs(ROUTED), STAGES, layout, rank).items():
            held[name] += box_numel(box)
    for spec in param_specs(ROUTED):
        if spec.is_expert:
            assert held[spec.name] == spec.numel * strategy.dp // strategy.expert_dp, spec.name
    for rank in layout.mesh.ranks:
        groups = {axis: layout.axis(axis, rank) for axis in AXES}
        assert len(groups["ep"]) * len(groups["edp"]) == strategy.dp
        assert set(groups["ep"]) & set(groups["edp"]) == {rank} and rank in groups["dp"]


def test_memory_of_experts_falls_with_their_degree() -> None:
    model = replace(ROUTED, n_experts=8)
    for text, share in (("d8", 1), ("d8e2", 2), ("d8e4", 4), ("d8e8", 8), ("d2t4e4", 4), ("d2t4e8", 8), ("d2t4e2", 4)):
        layout = Layout(DeviceMesh(tuple(range(8))), ParallelStrategy.parse(text))
        total = sum(spec.numel for spec in param_specs(model) if spec.is_expert)
        for rank in range(8):
            boxes = shard_boxes(param_specs(model), STAGES, layout, rank)
            assert sum(box_numel(boxes[s.name]) for s in param_specs(model) if s.is_expert) * share == total, text


@given(st.integers(1, 12), st.integers(1, 12), st.integers(1, 12), st.integers(1, 30))
def test_strategies_are_written_and_read(dp: int, tp: int, pp: int, ep: int) -> None:
    try:
        strategy = ParallelStrategy(dp, tp, pp, ep=ep)
    except ValueError as error:
        assert str(error).endswith(": " + ", ".join(map(str, expert_degrees(dp, tp))))
        assert ep not in expert_degrees(dp, tp)
        assert tp % ep and (ep % tp or dp % (ep // tp))
        return
    assert ep in expert_degrees(dp, tp)
    assert ParallelStrategy.parse(str(strategy)) == strategy
    assert strategy.n_replicas * strategy.n_shards == dp * tp
    if dp > 1 and ep > 1:
        with pytest.raises(ValueError, match="z3 already shards experts"):
            replace(strategy, zero3=True)


@settings(max_examples=examples(60))
@given(st.sampled_from("dtcpev"), st.integers(10**6, 10**30), st.sampled_from("dtpev"), st.integers(1, 10**30))
def test_sizes_beyond_any_cluster_are_read_at_once(one: str, n: int, other: str, m: int) -> None:
    """Nothing is searched in numbers up to a size of the options."""
    try:
        strategy = ParallelStrategy.parse(f"{one}{n}{other}{m}")
    except ValueError as error:
        assert len(str(error)) < 3000
    else:
        assert ParallelStrategy.parse(str(strategy)) == strategy
        assert not strategy_problems(ROUTED, nearest_strategy(strategy, 8, [ROUTED]))


def test_problems_of_models() -> None:
    parse = ParallelStrategy.parse
    assert strategy_problems(CONFIG, parse("d2e2")) == ["it has no experts"]
    assert strategy_problems(ROUTED, parse("d6e6")) == ["5 experts are fewer than expert-parallel size 6"]
    assert strategy_problems(ROUTED, parse("d2e2")) == strategy_problems(ROUTED, parse("t2e2")) == []
    narrow = replace(ROUTED, expert_intermediate=1, shared_intermediate=0)
    assert "smaller than" in strategy_problems(narrow, parse("t2"))[0]
    assert strategy_problems(narrow, parse("t2e2")) == []
    assert nearest_strategy(parse("d6e6"), 6, [ROUTED]) in (parse("d6e3"), parse("d6e2t1"))
    assert nearest_strategy(parse("d2e2"), 2, [CONFIG]) == parse("d2")


def call(kind: Kind) -> MFC:
    return MFC(kind.value, "actor", kind, InterfaceSpec("any"), ("a",), ("b",))


def test_what_calls_can_have() -> None:
    parse, role = ParallelStrategy.parse, lambda **options: RoleSpec(ModelSpec(**options))
    generate, train, infer = (call(kind) for kind in (Kind.GENERATE, Kind.TRAIN, Kind.INFERENCE))
    assert "nearest legal: d4t2p1e2" in expert_problem(generate, parse("d4t2e8"), role())
    assert expert_problem(generate, parse("d4t2e2"), role()) == ""
    assert "leave out e2" in expert_problem(generate, parse("d4t2e2"), role(), Backend.vllm)
    for options in ({"zero_stage": 3}, {"zero_stage": 2}, {"backend": Backend.megatron}):
        assert expert_problem(train, parse("d4t2e8"), role(**options))
        assert expert_problem(infer, parse("d4t2e8"), role(**options)) == ""
    assert expert_problem(train, parse("d4t2e2"), role(zero_stage=2)) == ""
    assert of_call(generate, parse("d4t2e8"), ROUTED) == parse("d4t2e2")
    assert of_call(train, parse("d4t2e8"), ROUTED) == parse("d4t2e8")
    assert of_call(train, parse("d4t2e8"), CONFIG) == of_call(train, parse("d4t2e8"), None) == parse("d4t2")


def test_layouts_of_the_planner() -> None:
    model, role = replace(ROUTED, n_experts=64), RoleSpec(ModelSpec())

    def degrees(kind: Kind, text: str) -> list[int]:
        layout = Layout(DeviceMesh(tuple(range(64))), ParallelStrategy.parse(text))
        return [found.strategy.ep for found in expert_layouts(call(kind), layout, model, role, 8)]

    assert degrees(Kind.TRAIN, "d32t2") == [1, 2, 8, 64] and degrees(Kind.TRAIN, "d64") == [1, 2, 8, 64]
    assert degrees(Kind.GENERATE, "d32t2") == [1, 2] and degrees(Kind.GENERATE, "d64") == [1]
    dense = Layout(DeviceMesh((0, 1)), ParallelStrategy(dp=2))
    assert expert_layouts(call(Kind.TRAIN), dense, CONFIG, role, 8) == [dense]
