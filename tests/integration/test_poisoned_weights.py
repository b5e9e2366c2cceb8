"""Whole runs with a weight that is not finite: they fail before they train, with the call, the step and the place."""

import math
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from tests.integration.conftest import Run, Started

pytestmark = [pytest.mark.dist, pytest.mark.slow]
PLACES = {
    "model.layers.0.mlp.down_proj.weight": ("layer 0", "layers.0.down"),
    "model.norm.weight": ("the final norm", "final_norm.weight"),
}


def poisoned(folder: Path, copy: Path, name: str, value: float) -> Path:
    shutil.copytree(folder, copy)
    (file,) = copy.glob("*.safetensors")
    weights = load_file(file)
    weights[name].view(-1)[3] = value
    save_file(weights, file, metadata={"format": "pt"})
    return copy


def failed(run: Run) -> str:
    """Return the error of a run that failed; it has no model."""
    assert run.code == 1 and not (run.root / "models").exists(), run.output
    (error,) = (line for line in run.output.splitlines() if line.startswith("error: "))
    assert error.removeprefix("error: ") in (run.root / "error.txt").read_text()
    return error


@pytest.mark.parametrize("name", PLACES)
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_generation_names_the_row_and_the_layer(
    realhf_start: Callable[..., Started], ppo_words: list[str], actor_folder: Path, tmp_path: Path, name: str,
    value: float,
) -> None:  # fmt: skip
    path = poisoned(actor_folder, tmp_path / "model", name, value)
    words = [*ppo_words, f"actor.path={path}", "ppo.gen.top_p=0.9"]
    error = failed(realhf_start("ppo-math", tmp_path, words).finish())
    place, ours = PLACES[name]
    assert "actor_gen" in error and "step 1" in error and "the logits of prompt" in error
    assert f"the first values that are not finite are those of {place} at position" in error
    assert f"parameters that are not finite: {ours}" in error


def test_a_critic_is_named(
    realhf_start: Callable[..., Started], ppo_words: list[str], actor_folder: Path, tmp_path: Path
) -> None:
    path = poisoned(actor_folder, tmp_path / "model", "model.layers.0.mlp.down_proj.weight", math.nan)
    words = [*ppo_words, f"critic.path={path}", "critic.init_critic_from_actor=True"]
    error = failed(realhf_start("ppo-math", tmp_path, words).finish())
    assert "critic" in error and "step 1" in error


def test_supervised_training_names_the_rows(
    realhf_start: Callable[..., Started], sft_words: list[str], actor_folder: Path, tmp_path: Path
) -> None:
    path = poisoned(actor_folder, tmp_path / "model", "model.layers.0.mlp.down_proj.weight", math.nan)
    words = [word for word in sft_words if not word.startswith(("model.init", "model.config", "model.tokenizer"))]
    error = failed(realhf_start("sft", tmp_path, [*words, f"model.path={path}"]).finish())
    assert "step 1" in error and "the loss of a micro-batch" in error and "is nan" in error
