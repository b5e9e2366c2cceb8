"""Models with quantized bases give the same results in every layout as on one worker."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from realhf.arch.peft_config import ADAPTER_WEIGHTS
from realhf.models.peft_folder import save_peft
from tests.models.sharding import InitialModel, Results, collect
from tests.models.test_quantized_base import quantized_model
from tests.models.tiny_models import GROUPED, hf_model

pytestmark = [pytest.mark.dist, pytest.mark.slow]
MODELS = tuple(f"{name} {bits}" for name in GROUPED for bits in (8, 4))
NAMES = ("whole", "t2", "t2 without sequence", "p2", "t2p2", "t4", "d2t2 overlapped")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("quantized")


@pytest.fixture(scope="module")
def results(on_ranks: Callable[..., list[Any]], root: Path) -> Results:
    collected: Results = {}
    starts = {name: initial_model(name, root / name / "original") for name in MODELS}
    collect(on_ranks, 4, starts, dict.fromkeys(starts, NAMES), root, collected)
    return collected


def initial_model(name: str, folder: Path) -> InitialModel:
    model_name, bits = name.rsplit(" ", 1)
    hf_model(model_name).save_pretrained(folder)
    model = quantized_model(folder, int(bits))
    save_peft(folder / "adapter", model.config, model.params.view, str(folder), None)
    return InitialModel(folder, adapter=folder / "adapter", bits=int(bits))


@pytest.mark.parametrize("layout", NAMES[1:])
@pytest.mark.parametrize("model", MODELS)
def test_every_layout_gives_the_same_columns_responses_and_step(
    model: str, layout: str, results: Results, root: Path
) -> None:
    (whole,), members = results[model, "whole"], results[model, layout]
    for member in members:
        for name, rows in member.columns.items():
            assert all(torch.allclose(value, whole.columns[name][row], atol=1e-5) for row, value in rows.items())
        assert all(torch.equal(tokens, whole.sampled[row]) for row, tokens in member.sampled.items())
        assert member.stats["grad_norm"][0] == pytest.approx(whole.stats["grad_norm"][0], rel=1e-4)
    expected, trained = (load_file(root / model / name / "trained" / ADAPTER_WEIGHTS) for name in ("whole", layout))
    for name, tensor in trained.items():
        assert torch.allclose(tensor, expected[name], atol=1e-5, rtol=0), name


@pytest.mark.parametrize("name", GROUPED)
def test_other_bits_are_other_models(name: str, results: Results) -> None:
    (eight,), (four,) = (results[f"{name} {bits}", "whole"] for bits in (8, 4))
    assert any(
        not torch.allclose(four.columns["logprobs"][row], value) for row, value in eight.columns["logprobs"].items()
    )
