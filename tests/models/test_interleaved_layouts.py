"""Models give the same results where pipeline stages have several chunks of layers as on one worker."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from realhf.arch.peft_config import ADAPTER_WEIGHTS
from realhf.models.peft_folder import save_peft
from tests.models.sharding import INTERLEAVED_LAYOUTS, LENGTHS, InitialModel, Results, collect
from tests.models.test_low_rank import with_adapters
from tests.models.tiny_models import DEEP, hf_model

pytestmark = [pytest.mark.dist, pytest.mark.slow]
CRITIC, ADAPTER = "deep gemma2 critic", "deep llama adapter"
ROUTED = ("deep qwen3_moe", "deep deepseek_v3")
MODELS = (*DEEP, CRITIC, ADAPTER)
LAYOUTS = ("whole", *INTERLEAVED_LAYOUTS)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("interleaved_layouts")


@pytest.fixture(scope="module")
def results(on_ranks: Callable[..., list[Any]], root: Path) -> Results:
    starts = {name: initial_model(name, root / name / "original") for name in MODELS}
    collected: Results = {}
    for some in (MODELS[:4], MODELS[4:-1]):
        collect(on_ranks, 4, {name: starts[name] for name in some}, LAYOUTS, root, collected)
    collect(on_ranks, 4, {ADAPTER: starts[ADAPTER]}, LAYOUTS[:-1], root, collected)
    return collected


def initial_model(name: str, folder: Path) -> InitialModel:
    hf_model(name.removesuffix(" critic").removesuffix(" adapter")).save_pretrained(folder)
    if name != ADAPTER:
        return InitialModel(folder, name == CRITIC)
    model = with_adapters(folder, False)
    save_peft(folder / "adapter", model.config, model.params.view, str(folder), None)
    return InitialModel(folder, adapter=folder / "adapter")


CASES = [(model, layout) for model in MODELS for layout in LAYOUTS[1 : -1 if model == ADAPTER else None]]
"""Adapters are not trained in ZeRO-3 layouts."""


@pytest.mark.parametrize(("model", "layout"), CASES)
def test_every_worker_computes_the_same_columns(model: str, layout: str, results: Results) -> None:
    (whole,), members = results[model, "whole"], results[model, layout]
    assert len(members) == len(INTERLEAVED_LAYOUTS[layout].layout.mesh.ranks)
    assert ("replayed" in whole.columns) == (model in ROUTED)
    for name, expected in whole.columns.items():
        assert {row for member in members for row in member.columns[name]} == set(expected) == set(range(len(LENGTHS)))
        for member in members:
            assert all(torch.allclose(value, expected[row], atol=1e-4) for row, value in member.columns[name].items())


@pytest.mark.parametrize(("model", "layout"), CASES)
def test_one_step_gives_the_same_weights(model: str, layout: str, results: Results, root: Path) -> None:
    (norm, _) = results[model, "whole"][0].stats["grad_norm"]
    assert all(member.stats["grad_norm"][0] == pytest.approx(norm, rel=1e-5) for member in results[model, layout])
    file = ADAPTER_WEIGHTS if model == ADAPTER else "model.safetensors"
    before, expected, trained = (
        load_file(root / model / name / file) for name in ("whole/saved", "whole/trained", f"{layout}/trained")
    )
    assert before.keys() == trained.keys() and any(not torch.equal(before[name], trained[name]) for name in trained)
    for name, tensor in trained.items():
        assert torch.allclose(tensor, expected[name], atol=1e-5, rtol=0), name
    saved = (root / model / layout / "saved" / file).read_bytes()
    assert saved == (root / model / "whole" / "saved" / file).read_bytes()


@pytest.mark.parametrize("layout", INTERLEAVED_LAYOUTS)
@pytest.mark.parametrize("model", ROUTED)
def test_router_statistics_are_those_of_one_worker(model: str, layout: str, results: Results) -> None:
    (whole,), members = results[model, "whole"], results[model, layout]
    replicas = {member.dp: member.stats for member in members if "nll" in member.stats}
    for name in ("nll", "router_balance_loss", "router_z_loss", "router_max_load"):
        value = sum(stats[name][0] for stats in replicas.values())  # of the last stages
        assert value == pytest.approx(whole.stats[name][0], rel=1e-6), name
