"""Models of every family with LoRA adapters give the same results in every layout as on one worker."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from realhf.arch.peft_config import ADAPTER_WEIGHTS
from realhf.models.peft_folder import save_peft
from tests.models.sharding import LENGTHS, TEMPERATURE, InitialModel, Results, batch_of, collect
from tests.models.test_low_rank import with_adapters
from tests.models.tiny_models import ONE_OF_EACH, hf_model
from tests.scaling import pairs, spread

pytestmark = [pytest.mark.dist, pytest.mark.slow]
CRITICS = ("qwen2 critic", "gpt2 critic", "qwen3_moe critic")
MODELS = (*ONE_OF_EACH, *CRITICS)
ROUTED = ("qwen3_moe", "qwen2_moe", "qwen3_moe critic")
EXPERT_NAMES = ("t2e2", "t4e2", "d2e2", "d4e2", "d2t2e4", "d2t2e4 without sequence")
DIVIDED = ("llama", "gpt2", "deepseek_v3", "qwen2 critic")
DIVIDED_NAMES = ("c2", "c4", "d2c2 overlapped", "c2p2")
NAMES = ("t2", "t2 without sequence", "p2", "t2p2", "t4", "d2t2", "d2t2 overlapped")
LAYOUTS = spread(MODELS, NAMES, 3)
OTHERS = spread(ROUTED, EXPERT_NAMES, 3), spread(DIVIDED, DIVIDED_NAMES, 2)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("adapters")


@pytest.fixture(scope="module")
def results(on_ranks: Callable[..., list[Any]], root: Path) -> Results:
    collected: Results = {}
    starts = {name: initial_model(name, root / name / "original") for name in MODELS}
    names = {model: ("whole", *layouts) for model, layouts in LAYOUTS.items()}
    for some in (MODELS[:10], MODELS[10:20], MODELS[20:]):
        collect(on_ranks, 4, {name: starts[name] for name in some}, names, root, collected)
    for layouts in OTHERS:
        collect(on_ranks, 4, {name: starts[name] for name in layouts}, layouts, root, collected)
    return collected


def initial_model(name: str, folder: Path) -> InitialModel:
    is_critic = name in CRITICS
    hf_model(name.removesuffix(" critic")).save_pretrained(folder)
    model = with_adapters(folder, is_critic)
    save_peft(folder / "adapter", model.config, model.params.view, str(folder), None)
    return InitialModel(folder, is_critic, folder / "adapter")


@pytest.mark.parametrize("model", ONE_OF_EACH)
def test_log_probabilities_equal_peft(model: str, results: Results, root: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import peft

        reference = peft.PeftModel.from_pretrained(hf_model(model), root / model / "original" / "adapter").eval()
    for number, row in enumerate(batch_of(range(len(LENGTHS)), "tokens").columns["tokens"].rows()):
        with torch.no_grad():
            logits = reference(row[None]).logits[0, :-1] / TEMPERATURE
        expected = logits.log_softmax(-1).gather(1, row[1:, None])[:, 0]
        for layout in ("whole", *LAYOUTS[model]):
            rows = [m.columns["logprobs"] for m in results[model, layout] if number in m.columns["logprobs"]]
            assert rows and all(torch.allclose(columns[number][1:], expected, atol=1e-5, rtol=1e-5) for columns in rows)


@pytest.mark.parametrize("model, layout", [case for table in (LAYOUTS, *OTHERS) for case in pairs(table)])
def test_every_layout_gives_the_same_columns_responses_and_step(
    model: str, layout: str, results: Results, root: Path
) -> None:
    (whole,), members = results[model, "whole"], results[model, layout]
    (norm, _) = whole.stats["grad_norm"]
    for member in members:
        for name, rows in member.columns.items():
            assert all(torch.allclose(value, whole.columns[name][row], atol=1e-4) for row, value in rows.items())
        assert all(torch.equal(tokens, whole.sampled[row]) for row, tokens in member.sampled.items())
        assert member.stats["grad_norm"][0] == pytest.approx(norm, rel=1e-4)
    before, expected, trained = (
        load_file(root / model / name / ADAPTER_WEIGHTS)
        for name in ("whole/saved", "whole/trained", f"{layout}/trained")
    )
    assert before.keys() == trained.keys() and all(not torch.equal(before[name], trained[name]) for name in trained)
    for name, tensor in trained.items():
        assert torch.allclose(tensor, expected[name], atol=1e-5, rtol=0), name


@pytest.mark.parametrize("model, layout", pairs(LAYOUTS))
def test_saved_folders_do_not_depend_on_the_layout(model: str, layout: str, results: Results, root: Path) -> None:
    first, saved = root / model / "whole" / "saved", root / model / layout / "saved"
    for file in saved.iterdir():
        assert file.read_bytes() == (first / file.name).read_bytes(), file.name
