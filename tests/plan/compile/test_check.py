"""Checks of graphs and strategies, and the nearest valid strategy."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from realhf.api.graph import MFC, InterfaceSpec, Kind
from realhf.api.layout import ParallelStrategy
from realhf.api.model_config import ModelConfig
from realhf.plan.compile.check import (
    distance,
    graph_notes,
    key_problems,
    model_problems,
    nearest_strategy,
    strategy_problems,
)
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
    assert model_problems((GEN,), []) == ["MFC gen: role 'actor' has no model (roles with one: none)"]


def test_unused_outputs_and_models() -> None:
    assert graph_notes((GEN, REW, TRAIN), ["actor", "actr", "ref"], ("rewards",)) == [
        "no MFC reads seeds of gen",
        "no MFC uses the model of role 'ref'",
    ]
    assert graph_notes((GEN, REW, TRAIN), ["actor", "actr"], ("rewards", "seeds")) == []
