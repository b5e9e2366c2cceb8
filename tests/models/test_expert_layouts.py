"""Routed models give the same results where experts are divided over workers as on one worker."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.models.layout_checks import check_columns, check_saved_bytes, check_statistics, check_step, starts_of
from tests.models.sharding import BALANCING_RATE, EXPERT_LAYOUTS, Results, collect
from tests.models.tiny_models import ONE_OF_EACH, WITH_EXPERTS
from tests.scaling import pairs, spread

pytestmark = [pytest.mark.dist, pytest.mark.slow]
ACTORS = (*(name for name in ONE_OF_EACH if name in WITH_EXPERTS), "qwen3_moe_some")
MODELS = (*ACTORS, "qwen3_moe critic")
LAYOUTS = spread(MODELS, EXPERT_LAYOUTS, 4)
CASES = pairs(LAYOUTS)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("expert_layouts")


@pytest.fixture(scope="module")
def results(on_ranks: Callable[..., list[Any]], root: Path) -> Results:
    starts, collected = starts_of(MODELS, root), Results()
    names = {model: ("whole", *layouts) for model, layouts in LAYOUTS.items()}
    for some in (MODELS[: len(MODELS) // 2], MODELS[len(MODELS) // 2 :]):
        collect(on_ranks, 4, {name: starts[name] for name in some}, names, root, collected)
    return collected


@pytest.mark.parametrize("model, layout", CASES)
def test_every_worker_computes_the_same(model: str, layout: str, results: Results) -> None:
    (whole,), members = results[model, "whole"], results[model, layout]
    sharded = EXPERT_LAYOUTS[layout].layout
    assert len(members) == len(sharded.mesh.ranks)
    check_columns(whole, members)
    for member in members:
        assert len(member.sampled) == (0 if sharded.strategy.expert_dp > 1 else len(member.sampled_logprobs))
        for row, tokens in member.sampled.items():
            assert torch.equal(tokens, whole.sampled[row])
            assert torch.allclose(member.sampled_logprobs[row], whole.sampled_logprobs[row], atol=1e-4)


@pytest.mark.parametrize("model, layout", CASES)
def test_one_step_gives_the_same_weights(model: str, layout: str, results: Results, root: Path) -> None:
    (whole,), members = results[model, "whole"], results[model, layout]
    check_step(root / model, layout, whole, members)
    check_saved_bytes(root / model, layout)


@pytest.mark.parametrize("model, layout", CASES)
def test_losses_are_those_of_one_worker(model: str, layout: str, results: Results) -> None:
    (whole,), members = results[model, "whole"], results[model, layout]
    loss = "nll" if model in ACTORS else "square"
    check_statistics(whole, members, (loss, "router_balance_loss", "router_z_loss", "router_max_load"), 1e-6)
    assert all(member.stats["router_max_rank_load"][0] >= member.stats["router_max_rank_load"][1] for member in members)


@pytest.mark.parametrize("model", ["deepseek_v3", "glm4_moe"])
def test_the_bias_of_the_choice_moves_towards_equal_loads(model: str, root: Path, results: Results) -> None:
    """By the rate, up or down; of experts with the mean load it stays."""
    before, after = (load_file(root / model / f"whole/{name}/model.safetensors") for name in ("saved", "trained"))
    names = [name for name in before if name.endswith("e_score_correction_bias")]
    assert names and results
    for name in names:
        steps = ((after[name] - before[name]) / BALANCING_RATE).round(decimals=3)
        assert set(steps.tolist()) <= {-1.0, 0.0, 1.0} and 1.0 in steps and -1.0 in steps
