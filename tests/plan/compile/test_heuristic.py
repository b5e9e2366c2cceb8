"""Heuristics return valid layouts on any cluster, and the expected layouts on common ones."""

from collections.abc import Mapping
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from realhf.api.graph import Graph
from realhf.api.model_config import ModelConfig
from realhf.experiments.ppo import PPOExperiment
from realhf.experiments.ppo_math import PPOMathExperiment
from realhf.plan.compile.check import strategy_problems
from realhf.plan.compile.heuristic import HEURISTICS, Cluster, Fits, Layouts, best_on
from tests.plan.search.planners import LLAMA
from tests.scaling import examples

GRAPHS = (PPOExperiment().graph(), PPOMathExperiment().graph())
LARGE = replace(LLAMA, n_layers=16, n_heads=16, n_kv_heads=8, intermediate=1024, vocab=1024)


def models_of(graph: Graph, actor: ModelConfig = LARGE) -> dict[str, ModelConfig]:
    return {role: replace(actor, head="scalar" if role in ("critic", "rew") else "lm") for role in graph.roles}


def always(chosen: Layouts) -> bool:
    return True


def never(chosen: Layouts) -> bool:
    return False


def by(rule: str, n: int, node_size: int, models: Mapping[str, ModelConfig] | None = None) -> dict[str, str]:
    found = HEURISTICS[rule](GRAPHS[0], models or models_of(GRAPHS[0]), Cluster(n, node_size), always)
    return {name: str(layout) for name, layout in found.items()}


@settings(max_examples=examples(250))
@given(
    st.sampled_from((1, 2, 3, 5, 6, 8, 12, 16, 24)),
    st.integers(1, 8),
    st.sampled_from(list(HEURISTICS)),
    st.sampled_from(GRAPHS),
    st.sampled_from((always, never, lambda chosen: len(chosen) == 1)),
    st.sampled_from((LARGE, LLAMA, replace(LLAMA, n_heads=6, n_kv_heads=3, n_layers=1))),
)
def test_every_heuristic_gives_every_call_a_valid_layout(
    n: int, node_size: int, rule: str, graph: Graph, fits: Fits, actor: ModelConfig
) -> None:
    models = {**models_of(graph, actor), "critic": replace(LLAMA, head="scalar")}
    cluster = Cluster(n, min(node_size, n))
    found = HEURISTICS[rule](graph, models, cluster, fits)
    assert set(found) == {m.name for m in graph.mfcs}
    for mfc in graph.mfcs:
        layout = found[mfc.name]
        assert set(layout.mesh.ranks) <= set(range(n))
        if mfc.role:
            assert not strategy_problems(models[mfc.role], layout.strategy)
        else:
            assert layout.strategy.world == layout.strategy.dp
        assert layout.strategy.tp <= node_size


def test_megatron_uses_tensor_parallelism_within_a_node() -> None:
    assert set(by("megatron", 16, 8).values()) == {"d2t8p1@0-15"}
    assert set(by("megatron", 12, 4).values()) == {"d3t4p1@0-11"}


def test_megatron_adds_stages_until_memory_suffices() -> None:
    models = models_of(GRAPHS[0])
    found = HEURISTICS["megatron"](GRAPHS[0], models, Cluster(32, 8), lambda f: f["actor_gen"].strategy.pp >= 2)
    assert {str(layout.strategy) for layout in found.values()} == {"d2t8p2"}


def test_pipe_model_has_one_stage_per_node() -> None:
    assert set(by("pipe_model", 32, 8).values()) == {"d1t8p4@0-31"}


def test_symmetric_uses_the_least_model_parallelism() -> None:
    assert set(by("symmetric", 16, 8).values()) == {"d16t1p1@0-15"}
    models = models_of(GRAPHS[0])
    found = HEURISTICS["symmetric"](GRAPHS[0], models, Cluster(16, 8), lambda f: f["actor_gen"].strategy.tp >= 4)
    assert {str(layout.strategy) for layout in found.values()} == {"d4t4p1"}


def test_real_divides_the_cluster_among_training_and_among_inference_calls() -> None:
    found = by("real", 16, 8)
    assert found["actor_gen"] == "d16t1p1@0-15"
    assert {found["actor_train"], found["critic_train"]} == {"d8t1p1@0-7", "d8t1p1@8-15"}
    meshes = [found[name].partition("@")[2] for name in ("rew_inf", "ref_inf", "critic_inf")]
    assert len(set(meshes)) == 3 and sorted(meshes)[0].startswith("0-")


def test_real_gives_larger_models_more_workers() -> None:
    models = models_of(GRAPHS[0])
    models["critic"] = replace(models["critic"], n_layers=5)
    found = HEURISTICS["real"](GRAPHS[0], models, Cluster(8, 8), always)
    assert len(found["actor_train"].mesh.ranks) == 6 and len(found["critic_train"].mesh.ranks) == 2


def test_split_separates_generation() -> None:
    found = by("split", 16, 8)
    assert found.pop("actor_gen") == "d8t1p1@0-7" and set(found.values()) == {"d8t1p1@8-15"}
    assert set(by("split", 1, 1).values()) == {"d1t1p1@0"}


@settings(max_examples=examples(100))
@given(st.integers(1, 40), st.integers(1, 8), st.lists(st.floats(0.01, 100), min_size=1, max_size=6))
def test_a_cluster_is_split_without_gaps(n: int, node_size: int, shares: list[float]) -> None:
    assume(n >= len(shares))
    cluster = Cluster(n, min(node_size, n))
    meshes = cluster.split({f"m{i}": share for i, share in enumerate(shares)})
    ranks = [rank for mesh in meshes.values() for rank in mesh.ranks]
    assert ranks == list(range(len(ranks))) and len(ranks) > n - node_size  # the remainder is less than a node
    assert all(mesh.ranks for mesh in meshes.values())


def test_fallback_to_data_parallelism() -> None:
    graph = GRAPHS[0]
    cluster, models = Cluster(5, 5), {role: replace(LLAMA, n_layers=1) for role in graph.roles}
    found = best_on(cluster.whole, graph["actor_train"], models, cluster, never)
    assert str(found) == "d5t1p1@0-4"  # data parallelism is always valid


@pytest.mark.parametrize("rule", HEURISTICS)
def test_calls_without_a_model_use_data_parallelism(rule: str) -> None:
    graph = GRAPHS[1]
    found = HEURISTICS[rule](graph, models_of(graph), Cluster(8, 4), always)
    assert found["rew_inf"].strategy.world == found["rew_inf"].strategy.dp
