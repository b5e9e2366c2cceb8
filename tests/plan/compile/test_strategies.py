"""The layouts of a search are valid, distinct, and complete on a small cluster."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from realhf.api.layout import ParallelStrategy
from realhf.api.model_config import ModelConfig
from realhf.plan.compile.check import divisors, strategy_problems
from realhf.plan.compile.strategies import MAX_STAGES, layouts, meshes, strategies
from tests.plan.search.planners import LLAMA
from tests.scaling import examples

NODES, NODE_SIZES = st.integers(1, 12), st.integers(1, 8)
MODELS = st.builds(
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


@settings(max_examples=examples(60))
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


@settings(max_examples=examples(100))
@given(NODES, NODE_SIZES, MODELS)
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
