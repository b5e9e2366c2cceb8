"""Models give the same results where pipeline stages have several chunks of layers as on one worker."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from realhf.arch.peft_config import ADAPTER_WEIGHTS
from realhf.models.peft_folder import save_peft
from tests.models.layout_checks import WEIGHTS, check_columns, check_saved_bytes, check_statistics, check_step
from tests.models.sharding import INTERLEAVED_LAYOUTS, InitialModel, Results, collect
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
        collect(on_ranks, 4, {name: starts[name] for name in some}, dict.fromkeys(some, LAYOUTS), root, collected)
    collect(on_ranks, 4, {ADAPTER: starts[ADAPTER]}, {ADAPTER: LAYOUTS[:-1]}, root, collected)
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
    check_columns(whole, members)


@pytest.mark.parametrize(("model", "layout"), CASES)
def test_one_step_gives_the_same_weights(model: str, layout: str, results: Results, root: Path) -> None:
    (whole,), members = results[model, "whole"], results[model, layout]
    file = ADAPTER_WEIGHTS if model == ADAPTER else WEIGHTS
    check_step(root / model, layout, whole, members, file=file)
    check_saved_bytes(root / model, layout, file)


@pytest.mark.parametrize("layout", INTERLEAVED_LAYOUTS)
@pytest.mark.parametrize("model", ROUTED)
def test_router_statistics_are_those_of_one_worker(model: str, layout: str, results: Results) -> None:
    (whole,), members = results[model, "whole"], results[model, layout]
    check_statistics(whole, members, ("nll", "router_balance_loss", "router_z_loss", "router_max_load"), 1e-6)
