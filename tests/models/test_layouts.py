"""Models of every family cut over workers compute, learn and write what they do in one piece, critics too."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.models.sharding import CUTS, LENGTHS, TEMPERATURE, Start, Told, batch_of, job
from tests.models.tiny_models import ONE_OF_EACH, theirs

pytestmark = [pytest.mark.dist, pytest.mark.slow]
ACTORS = (*ONE_OF_EACH, "llama_tied", "qwen3_moe_some")
CRITICS = ("llama critic", "gpt2 critic", "gemma2 critic", "qwen3_moe critic")
ROUTED = ("mixtral", "qwen3_moe", "qwen3_moe_some", "qwen3_moe critic")
MODELS = ACTORS + CRITICS
OTHERS = tuple(name for name in CUTS if name != "whole")
ON_EIGHT = tuple(name for name in CUTS if len(CUTS[name].layout.mesh.ranks) == 8)
ON_FOUR = tuple(name for name in CUTS if name not in ON_EIGHT)
Results = dict[tuple[str, str], list[Told]]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("layouts")


@pytest.fixture(scope="module")
def told(on_ranks: Callable[..., list[Any]], root: Path) -> Results:
    """What every member said, by model and layout. Some models at a time: slow machines keep the time of ranks."""
    for name in ACTORS:
        theirs(name).save_pretrained(root / name / "original")
    starts = {name: Start(root / name.removesuffix(" critic") / "original", name in CRITICS) for name in MODELS}
    results: Results = {}

    def take(world: int, cuts: tuple[str, ...], some: dict[str, Start]) -> None:
        for answers in on_ranks(world, job, some, cuts, root):
            for key, value in answers.items():
                results.setdefault(key, []).append(value)

    for some in (ACTORS[:6], ACTORS[6:], CRITICS):
        take(4, ON_FOUR, {name: starts[name] for name in some})
    for some in (ACTORS, CRITICS):
        take(8, ON_EIGHT, {name: Start(root / name / ON_FOUR[-1] / "saved", name in CRITICS) for name in some})
    return results


@pytest.mark.parametrize("model", ACTORS)
def test_log_probabilities_are_those_of_hugging_face(model: str, told: Results) -> None:
    rows, hugging_face = batch_of(range(len(LENGTHS)), "tokens").columns["tokens"].rows(), theirs(model)
    for number, row in enumerate(rows):
        with torch.no_grad():
            logits = hugging_face(row[None]).logits[0, :-1] / TEMPERATURE
        expected = logits.log_softmax(-1).gather(1, row[1:, None])[:, 0]
        found = [m.columns["logprobs"] for cut in CUTS for m in told[model, cut] if number in m.columns["logprobs"]]
        assert len(found) >= len(CUTS)
        assert all(torch.allclose(columns[number][1:], expected, atol=1e-4) for columns in found)


@pytest.mark.parametrize("cut", OTHERS)
@pytest.mark.parametrize("model", MODELS)
def test_every_worker_computes_the_same(model: str, cut: str, told: Results) -> None:
    (whole,), members = told[model, "whole"], told[model, cut]
    assert len(members) == len(CUTS[cut].layout.mesh.ranks)
    for name, expected in whole.columns.items():
        assert {row for member in members for row in member.columns[name]} == set(expected) == set(range(len(LENGTHS)))
        for member in members:
            assert all(torch.allclose(value, expected[row], atol=1e-4) for row, value in member.columns[name].items())


@pytest.mark.parametrize("cut", OTHERS)
@pytest.mark.parametrize("model", ACTORS)
def test_every_worker_draws_the_same(model: str, cut: str, told: Results) -> None:
    (whole,), members = told[model, "whole"], told[model, cut]
    for member in members:
        for row, tokens in member.drawn.items():
            assert torch.equal(tokens, whole.drawn[row])
            assert torch.allclose(member.drawn_logprobs[row], whole.drawn_logprobs[row], atol=1e-4)


@pytest.mark.parametrize("cut", OTHERS)
@pytest.mark.parametrize("model", MODELS)
def test_one_step_leads_to_the_same_weights(model: str, cut: str, told: Results, root: Path) -> None:
    (norm, _) = told[model, "whole"][0].stats["grad_norm"]
    assert all(member.stats["grad_norm"][0] == pytest.approx(norm, rel=1e-4) for member in told[model, cut])
    before, expected, ours = (
        load_file(root / model / name / "model.safetensors")
        for name in ("whole/saved", "whole/trained", f"{cut}/trained")
    )
    assert before.keys() == ours.keys() and any(not torch.equal(before[name], ours[name]) for name in ours)
    for name, tensor in ours.items():
        assert torch.allclose(tensor, expected[name], atol=1e-5, rtol=0), name


@pytest.mark.parametrize("cut", OTHERS)
@pytest.mark.parametrize("model", ROUTED)
@pytest.mark.parametrize("loss", ["router_balance_loss", "router_z_loss"])
def test_what_routers_lose_depends_on_neither_layout_nor_micro_batches(
    loss: str, model: str, cut: str, told: Results
) -> None:
    (whole,), members = told[model, "whole"], told[model, cut]
    replicas = {member.dp: member.stats[loss] for member in members}
    assert all(member.stats[loss] == replicas[member.dp] for member in members)
    sums = [sum(parts) for parts in zip(*replicas.values(), strict=True)]
    assert sums == pytest.approx(whole.stats[loss], rel=1e-5) and sums[0] > 0 and sums[1] == sum(LENGTHS)


@pytest.mark.parametrize("cut", OTHERS)
@pytest.mark.parametrize("model", MODELS)
def test_what_one_layout_saves_another_loads_and_saves_alike(model: str, cut: str, told: Results, root: Path) -> None:
    first, ours = root / model / "whole" / "saved", root / model / cut / "saved"
    assert sorted(file.name for file in ours.iterdir()) == ["config.json", "model.safetensors"]
    for file in ours.iterdir():
        assert file.read_bytes() == (first / file.name).read_bytes()
