"""Models of every family cut over workers compute, learn and write what they do in one piece."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.models.cut import CUTS, Told, job
from tests.models.zoo import ONE_OF_EACH, theirs

pytestmark = [pytest.mark.dist, pytest.mark.slow]
MODELS = (*ONE_OF_EACH, "llama_tied", "qwen3_moe_some")
OTHERS = tuple(name for name in CUTS if name != "whole")
Results = dict[tuple[str, str], list[Told]]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("layouts")


@pytest.fixture(scope="module")
def told(on_ranks: Callable[..., list[Any]], root: Path) -> Results:
    """What every member said, by model and layout."""
    folders = {}
    for name in MODELS:
        folders[name] = root / name / "original"
        theirs(name).save_pretrained(folders[name])
    results: Results = {}
    for some in (MODELS[:6], MODELS[6:]):  # half of them, so that slow machines keep the time that ranks have
        for answers in on_ranks(4, job, {name: folders[name] for name in some}, root):
            for key, value in answers.items():
                results.setdefault(key, []).append(value)
    return results


@pytest.mark.parametrize("cut", OTHERS)
@pytest.mark.parametrize("model", MODELS)
def test_every_worker_computes_the_same(model: str, cut: str, told: Results) -> None:
    (whole,), members = told[model, "whole"], told[model, cut]
    assert len(members) == len(CUTS[cut].layout.mesh.ranks)
    assert {row for member in members for row in member.logprobs} == set(whole.logprobs)
    for member in members:
        for row, expected in whole.logprobs.items():
            if row in member.logprobs:
                assert torch.allclose(member.logprobs[row], expected, atol=1e-4)
                assert torch.allclose(member.logits[row], whole.logits[row], atol=1e-4)


@pytest.mark.parametrize("cut", OTHERS)
@pytest.mark.parametrize("model", MODELS)
def test_every_worker_draws_the_same(model: str, cut: str, told: Results) -> None:
    (whole,), members = told[model, "whole"], told[model, cut]
    for member in members:
        for row, tokens in member.drawn.items():
            assert torch.equal(tokens, whole.drawn[row])
            assert torch.allclose(member.drawn_logprobs[row], whole.drawn_logprobs[row], atol=1e-4)


@pytest.mark.parametrize("cut", OTHERS)
@pytest.mark.parametrize("model", MODELS)
def test_one_step_leads_to_the_same_weights(model: str, cut: str, told: Results, root: Path) -> None:
    norm = told[model, "whole"][0].grad_norm
    assert all(member.grad_norm == pytest.approx(norm, rel=1e-4) for member in told[model, cut])
    before, expected, ours = (
        load_file(root / model / name / "model.safetensors") for name in ("original", "whole/trained", f"{cut}/trained")
    )
    assert before.keys() == ours.keys() and any(not torch.equal(before[name], ours[name]) for name in ours)
    for name, tensor in ours.items():
        assert torch.allclose(tensor, expected[name], atol=1e-5, rtol=0), name


@pytest.mark.parametrize("cut", OTHERS)
@pytest.mark.parametrize("model", MODELS)
def test_what_one_layout_saves_another_loads_and_saves_alike(model: str, cut: str, told: Results, root: Path) -> None:
    first, ours = root / model / "whole" / "saved", root / model / cut / "saved"
    assert sorted(file.name for file in ours.iterdir()) == ["config.json", "model.safetensors"]
    for file in ours.iterdir():
        assert file.read_bytes() == (first / file.name).read_bytes()
