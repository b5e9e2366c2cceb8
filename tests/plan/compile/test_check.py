"""Checks of graphs and strategies; the layouts of a search are valid, distinct, and complete on a small cluster."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from realhf.api.graph import MFC, Graph, InterfaceSpec, Kind, Sync
from realhf.api.layout import ParallelStrategy
from realhf.api.model_config import GatedDelta, Lora, ModelConfig
from realhf.plan.compile.check import (
    MAX_STAGES,
    distance,
    divisors,
    graph_notes,
    key_problems,
    layouts,
    meshes,
    model_problems,
    nearest_strategy,
    strategies,
    strategy_problems,
    sync_problems,
)
from tests.plan.search.planners import LLAMA
from tests.scaling import examples

MODEL = ModelConfig("llama", n_layers=3, hidden=24, n_heads=6, n_kv_heads=2, head_dim=4, intermediate=40, vocab=11,
                    max_positions=64)  # fmt: skip


@pytest.mark.parametrize("text", ["d1", "t2", "t6", "p3", "d5t2p3"])
def test_legal(text: str) -> None:
    assert strategy_problems(MODEL, ParallelStrategy.parse(text)) == []


def test_heads_must_be_divisible() -> None:
    for tp in (4, 3):  # with 3, query heads would be separated from their KV head
        line = f"6 heads (2 KV heads) are not divisible by tensor-parallel size {tp}"
        assert strategy_problems(MODEL, ParallelStrategy(tp=tp)) == [line]


def test_linear_key_heads_must_be_divisible() -> None:
    hybrid = replace(MODEL, delta=GatedDelta(3, 6, 4, 4, 4), delta_layers=(0, 1))
    line = "3 linear key heads are not divisible by tensor-parallel size 2"
    assert strategy_problems(hybrid, ParallelStrategy(tp=2)) == [line]
    assert strategy_problems(replace(hybrid, delta_layers=()), ParallelStrategy(tp=2)) == []


def test_more_stages_than_layers() -> None:
    both = strategy_problems(MODEL, ParallelStrategy(tp=4, pp=4))
    assert len(both) == 2 and both[1] == "3 layers are fewer than 4 pipeline stages"


def test_dimensions_smaller_than_tensor_parallelism() -> None:
    for small in (replace(MODEL, vocab=5), replace(MODEL, intermediate=5), replace(MODEL, expert_intermediate=5)):
        assert strategy_problems(small, ParallelStrategy(tp=6)) == [
            "a dimension of 5 is smaller than tensor-parallel size 6"
        ]


DEGREES = st.integers(1, 12)
MODELS = st.builds(
    lambda kv, groups, layers: replace(MODEL, n_kv_heads=kv, n_heads=kv * groups, n_layers=layers),
    st.integers(1, 4),
    st.integers(1, 4),
    st.integers(1, 5),
)


@settings(max_examples=examples(200))
@given(st.builds(ParallelStrategy, DEGREES, DEGREES, DEGREES), st.integers(1, 24), st.lists(MODELS, max_size=2))
def test_nearest_strategy_is_valid_and_nearest(
    requested: ParallelStrategy, world: int, models: list[ModelConfig]
) -> None:
    def is_legal(strategy: ParallelStrategy) -> bool:
        return strategy.world == world and not any(strategy_problems(model, strategy) for model in models)

    near = nearest_strategy(requested, world, models)
    assert is_legal(near) and (near == requested or not is_legal(requested))
    degrees = range(1, world + 1)
    every = (ParallelStrategy(world // tp // pp, tp, pp) for tp in degrees for pp in degrees if world >= tp * pp)
    assert all(distance(near, requested) <= distance(other, requested) for other in every if is_legal(other))


def test_distance() -> None:
    assert distance(ParallelStrategy(4, 2, 3), ParallelStrategy(2, 2, 1)) == 6
    assert distance(ParallelStrategy(), ParallelStrategy()) == 1


SPEC = InterfaceSpec("any")
GEN = MFC("gen", "actor", Kind.GENERATE, SPEC, ("prompts",), ("tokens", "seeds"))
REW = MFC("rew", None, Kind.INFERENCE, SPEC, ("tokens", "rows"), ("rewards",))
TRAIN = MFC("train", "actr", Kind.TRAIN, SPEC, ("tokens", "reward", "rows"))


def test_missing_keys_are_listed_with_their_readers() -> None:
    assert key_problems((GEN, REW, TRAIN), {"prompts", "row"}, "maths data") == [
        "rew and train need 'rows': no MFC produces it, and maths data has only prompts, row  did you mean row ?",
        "train needs 'reward': no MFC produces it, and maths data has only prompts, row  did you mean rewards ?",
    ]
    assert key_problems((GEN, REW), {"prompts", "rows"}, "data") == []


def test_roles_without_a_model() -> None:
    assert model_problems((GEN, REW, TRAIN), ["actor", "ref"]) == [
        "MFC train: role 'actr' has no model (roles with one: actor, ref)  did you mean actor ?"
    ]
    assert model_problems((GEN,), ["actor"], ["actro"]) == [
        "moving average 'actro' has no model (roles with one: actor)  did you mean actor ?"
    ]
    assert model_problems((GEN,), []) == ["MFC gen: role 'actor' has no model (roles with one: none)"]


def test_unused_outputs_and_models() -> None:
    assert graph_notes(Graph((GEN, REW, TRAIN)), ["actor", "actr", "ref"], ("rewards",)) == [
        "no MFC reads seeds of gen",
        "no MFC uses the model of role 'ref'",
    ]
    assert graph_notes(Graph((GEN, REW, TRAIN)), ["actor", "actr"], ("rewards", "seeds")) == []


NODES, NODE_SIZES = st.integers(1, 12), st.integers(1, 8)
GROUPED_MODELS = st.builds(
    lambda kv, groups, layers: replace(LLAMA, n_kv_heads=kv, n_heads=kv * groups, n_layers=layers),
    st.sampled_from((1, 2, 3, 4, 8)),
    st.sampled_from((1, 2, 3)),
    st.integers(1, 20),
)


def test_divisors() -> None:
    assert divisors(12) == [1, 2, 3, 4, 6, 12] and divisors(1) == [1]


def texts(n_workers: int, node_size: int) -> list[str]:
    return [str(mesh) for mesh in meshes(n_workers, node_size)]


def test_meshes_of_one_node_are_all_ranges() -> None:
    assert texts(1, 1) == ["0"]
    assert sorted(texts(3, 3)) == ["0", "0-1", "0-2", "1", "1-2", "2"]
    assert len(texts(6, 6)) == 21


def test_meshes_of_several_nodes() -> None:
    found = texts(8, 4)
    assert {"0-7", "0-3", "4-7", "0-1", "6-7", "0", "7"} <= set(found)
    assert "2-5" not in found and "0-5" not in found  # not whole nodes, and not a fraction of one
    assert {"0-23", "8-31", "0-15", "24-31"} <= set(texts(32, 8))
    assert len(texts(1024, 8)) < 40


@settings(max_examples=examples(60), deadline=None)
@given(NODES, NODE_SIZES)
def test_meshes_are_distinct_and_valid(n_nodes: int, node_size: int) -> None:
    n = n_nodes * node_size
    found = meshes(n, node_size)
    assert len(set(found)) == len(found) and tuple(range(n)) in [mesh.ranks for mesh in found]
    for mesh in found:
        first, size = mesh.ranks[0], len(mesh.ranks)
        assert mesh.ranks == tuple(range(first, first + size)) and first + size <= n
        if n_nodes > 1:
            in_one_node = first // node_size == (first + size - 1) // node_size
            assert in_one_node or first % node_size == size % node_size == 0


def test_strategies() -> None:
    found = {str(s) for s in strategies(8, 4, LLAMA)}
    assert found == {"d8t1p1", "d4t1p2", "d2t1p4", "d4t2p1", "d2t2p2", "d1t2p4", "d2t4p1", "d1t4p2"}
    assert list(strategies(6, 4, None)) == [ParallelStrategy(6)]
    assert {str(s) for s in strategies(3, 4, replace(LLAMA, n_heads=6, n_kv_heads=3))} == {"d3t1p1", "d1t3p1", "d1t1p3"}


@settings(max_examples=examples(100), deadline=None)
@given(NODES, NODE_SIZES, GROUPED_MODELS)
def test_layouts_are_valid_and_tensor_groups_stay_in_a_node(n_nodes: int, node_size: int, model: ModelConfig) -> None:
    found = layouts(n_nodes * node_size, node_size, model)
    assert len(set(found)) == len(found) > 0
    for layout in found:
        assert not strategy_problems(model, layout.strategy)
        assert layout.strategy.pp <= MAX_STAGES
        groups = {layout.axis("tp", rank) for rank in layout.mesh.ranks}
        assert all(group[0] // node_size == group[-1] // node_size for group in groups)


@pytest.mark.parametrize("n_workers", [1, 2, 3, 4])
def test_all_valid_layouts_of_a_small_node(n_workers: int) -> None:
    found = {(str(x.strategy), x.mesh.ranks) for x in layouts(n_workers, n_workers, LLAMA)}
    for first in range(n_workers):
        for size in range(1, n_workers - first + 1):
            for dp in divisors(size):
                for tp in divisors(size // dp):
                    strategy = ParallelStrategy(dp, tp, size // dp // tp)
                    legal = not strategy_problems(LLAMA, strategy)
                    assert ((str(strategy), tuple(range(first, first + size))) in found) == legal


@pytest.mark.parametrize(
    "edit, reason",
    [
        ({}, ""),
        ({"max_positions": 128}, ""),
        ({"n_layers": 6}, "layers.3.attn_norm.weight has the shapes none and [24]"),
        ({"n_layers": 2}, "has the shapes [24] and none"),
        ({"n_kv_heads": 6}, "layers.0.wk has the shapes [8, 24] and [24, 24]"),
        ({"vocab": 16}, "embed.weight has the shapes [11, 24] and [16, 24]"),
        ({"tied_embedding": True}, "head.weight has the shapes [11, 24] and none"),
        ({"family": "mistral"}, "they are llama and mistral models"),
        ({"lora": Lora(4)}, "ref.lora.rank=4 freezes the weights"),
    ],
)
def test_an_average_has_the_parameters_of_its_source(edit: dict, reason: str) -> None:
    """Without the check the layers that both have would be averaged, and the others left alone."""
    problems = sync_problems([Sync("train", "actor", "ref", 0.5)], {"actor": MODEL, "ref": replace(MODEL, **edit)})
    assert len(problems) == bool(reason)
    assert all(reason in line and line.startswith("ref is an average of actor") for line in problems)
