"""Models and critics of every family give the same results in every layout as on one worker."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.models.layout_checks import check_columns, check_step, starts_of
from tests.models.sharding import LAYOUTS, LENGTHS, TEMPERATURE, InitialModel, Results, batch_of, collect
from tests.models.tiny_models import ONE_OF_EACH, WITH_EXPERTS, hf_model
from tests.scaling import pairs, spread, subset

pytestmark = [pytest.mark.dist, pytest.mark.slow]
ACTORS = (*ONE_OF_EACH, "llama_tied", "qwen3_moe_some")
CRITICS = ("llama critic", "gpt2 critic", "gemma2 critic", "qwen3_moe critic", "olmo2 critic")
ROUTED = (*(name for name in ACTORS if name in WITH_EXPERTS), "qwen3_moe_some", "qwen3_moe critic")
MODELS = ACTORS + CRITICS
AT_ONCE = 10
"""Models per job of four ranks, which has a time limit."""
ON_EIGHT = "d2t2p2"
ON_FOUR = spread(MODELS, (name for name in LAYOUTS if name not in ("whole", ON_EIGHT)), 3)
MODELS_ON_EIGHT = subset(MODELS, 10)
CASES = pairs(ON_FOUR) + [(model, ON_EIGHT) for model in MODELS_ON_EIGHT]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("layouts")


@pytest.fixture(scope="module")
def results(on_ranks: Callable[..., list[Any]], root: Path) -> Results:
    """The results of every worker by model and layout; a few models per job, to stay within the time limit of ranks."""
    starts, collected = starts_of(MODELS, root), Results()

    names = {model: ("whole", *layouts) for model, layouts in ON_FOUR.items()}
    for first in range(0, len(MODELS), AT_ONCE):
        some_starts = {model: starts[model] for model in MODELS[first : first + AT_ONCE]}
        collect(on_ranks, 4, some_starts, names, root, collected)
    saved = {model: InitialModel(root / model / "whole" / "saved", model in CRITICS) for model in MODELS_ON_EIGHT}
    collect(on_ranks, 8, saved, dict.fromkeys(saved, (ON_EIGHT,)), root, collected)
    return collected


@pytest.mark.parametrize("model", ACTORS)
def test_log_probabilities_equal_transformers(model: str, results: Results) -> None:
    rows, reference = batch_of(range(len(LENGTHS)), "tokens").columns["tokens"].rows(), hf_model(model)
    for number, row in enumerate(rows):
        with torch.no_grad():
            logits = reference(row[None]).logits[0, :-1] / TEMPERATURE
        expected = logits.log_softmax(-1).gather(1, row[1:, None])[:, 0]
        layouts = ("whole", *(layout for name, layout in CASES if name == model))
        computed = [
            m.columns["logprobs"]
            for layout in layouts
            for m in results[model, layout]
            if number in m.columns["logprobs"]
        ]
        assert len(computed) >= len(layouts)
        assert all(torch.allclose(columns[number][1:], expected, atol=1e-4) for columns in computed)


@pytest.mark.parametrize("model, layout", CASES)
def test_every_worker_computes_the_same_columns(model: str, layout: str, results: Results) -> None:
    (whole,), members = results[model, "whole"], results[model, layout]
    assert len(members) == len(LAYOUTS[layout].layout.mesh.ranks)
    assert ("replayed" in whole.columns) == (model in ROUTED and model in ACTORS)
    check_columns(whole, members)


@pytest.mark.parametrize("model, layout", [case for case in CASES if case[0] in ACTORS])
def test_every_worker_samples_the_same_responses(model: str, layout: str, results: Results) -> None:
    (whole,), members = results[model, "whole"], results[model, layout]
    for member in members:
        for row, tokens in member.sampled.items():
            assert torch.equal(tokens, whole.sampled[row])
            assert torch.allclose(member.sampled_logprobs[row], whole.sampled_logprobs[row], atol=1e-4)
            if whole.sampled_experts is not None:
                assert torch.equal(member.sampled_experts[row], whole.sampled_experts[row])


@pytest.mark.parametrize("model, layout", CASES)
def test_one_step_gives_the_same_weights(model: str, layout: str, results: Results, root: Path) -> None:
    (whole,), members = results[model, "whole"], results[model, layout]
    check_step(root / model, layout, whole, members, rel=1e-4)


@pytest.mark.parametrize("model, layout", [case for case in CASES if case[0] in ROUTED])
@pytest.mark.parametrize("loss", ["router_balance_loss", "router_z_loss"])
def test_router_losses_are_independent_of_the_layout(loss: str, model: str, layout: str, results: Results) -> None:
    (whole,), members = results[model, "whole"], results[model, layout]
    replicas = {member.dp: member.stats[loss] for member in members}
    assert all(member.stats[loss] == replicas[member.dp] for member in members)
    sums = [sum(parts) for parts in zip(*replicas.values(), strict=True)]
    assert sums == pytest.approx(whole.stats[loss], rel=1e-5) and sums[0] > 0 and sums[1] == sum(LENGTHS)


@pytest.mark.parametrize("model, layout", CASES)
def test_saved_folders_do_not_depend_on_the_layout(model: str, layout: str, results: Results, root: Path) -> None:
    first, saved = root / model / "whole" / "saved", root / model / layout / "saved"
    assert sorted(file.name for file in saved.iterdir()) == ["config.json", "model.safetensors"]
    for file in saved.iterdir():
        assert file.read_bytes() == (first / file.name).read_bytes()
