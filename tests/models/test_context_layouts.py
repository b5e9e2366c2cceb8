"""Models give the same results where workers divide the tokens of rows as on one worker."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from realhf.api.layout import ParallelStrategy
from realhf.arch.hf_config import read_hf_config
from realhf.plan.compile.check import strategy_problems
from tests.models.sharding import CONTEXT_LAYOUTS, LENGTHS, InitialModel, Results, collect
from tests.models.tiny_models import ONE_OF_EACH, hf_model

pytestmark = [pytest.mark.dist, pytest.mark.slow]
HYBRID = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")  # refused
ACTORS = (*(name for name in ONE_OF_EACH if name not in HYBRID), "llama_tied")
MODELS = (*ACTORS, "llama critic", "qwen3_moe critic", "gemma2 critic")
LAYOUTS = ("whole", *CONTEXT_LAYOUTS)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("context_layouts")


@pytest.fixture(scope="module")
def results(on_ranks: Callable[..., list[Any]], root: Path) -> Results:
    for name in ACTORS:
        hf_model(name).save_pretrained(root / name / "original")
    starts = {name: InitialModel(root / name.removesuffix(" critic") / "original", name not in ACTORS)
              for name in MODELS}  # fmt: skip
    collected: Results = {}
    for some in (MODELS[:12], MODELS[12:24], MODELS[24:]):
        collect(on_ranks, 4, {name: starts[name] for name in some}, LAYOUTS, root, collected)
    return collected


@pytest.mark.parametrize("model", HYBRID)
def test_linear_attention_is_refused(model: str, tmp_path: Path) -> None:
    hf_model(model).save_pretrained(tmp_path)
    config = read_hf_config(tmp_path, False)
    assert strategy_problems(config, ParallelStrategy.parse("c2")) == [
        "its linear attention needs whole rows on a rank, which c divides"
    ]


@pytest.mark.parametrize("layout", CONTEXT_LAYOUTS)
@pytest.mark.parametrize("model", MODELS)
def test_every_worker_computes_the_same_and_makes_the_same_step(
    model: str, layout: str, results: Results, root: Path
) -> None:
    (whole,), members = results[model, "whole"], results[model, layout]
    assert len(members) == len(CONTEXT_LAYOUTS[layout].layout.mesh.ranks)
    for name, expected in whole.columns.items():
        assert {row for member in members for row in member.columns[name]} == set(expected) == set(range(len(LENGTHS)))
        for member in members:
            assert all(torch.allclose(value, expected[row], atol=1e-4) for row, value in member.columns[name].items())
    for member in members:
        assert member.stats["grad_norm"][0] == pytest.approx(whole.stats["grad_norm"][0], rel=1e-5)
    replicas = {member.dp: member.stats for member in members if {"nll", "square"} & member.stats.keys()}
    for loss in {"nll", "square", "router_balance_loss", "router_z_loss", "router_max_load"} & whole.stats.keys():
        assert sum(stats[loss][0] for stats in replicas.values()) == pytest.approx(whole.stats[loss][0], rel=1e-5), loss
    before, expected, trained = (
        load_file(root / model / name / "model.safetensors")
        for name in ("whole/saved", "whole/trained", f"{layout}/trained")
    )
    assert before.keys() == trained.keys() and any(not torch.equal(before[name], trained[name]) for name in trained)
    for name, tensor in trained.items():
        assert torch.allclose(tensor, expected[name], atol=1e-5, rtol=0), name
    saved = (root / model / layout / "saved" / "model.safetensors").read_bytes()
    assert saved == (root / model / "whole" / "saved" / "model.safetensors").read_bytes()
