"""Damaged weights are found before the launch."""

import json
import random
import shutil
from pathlib import Path

import pytest

from realhf.apps.prepare.preflight import weight_problems


@pytest.mark.parametrize("seed", range(20))
def test_damaged_weights_are_named(actor_folder: Path, tmp_path: Path, seed: int) -> None:
    """A file truncated at a random byte, with or without an index that lists it."""
    dice, folder = random.Random(seed), tmp_path / "model"
    shutil.copytree(actor_folder, folder)
    data, name = (folder / "model.safetensors").read_bytes(), dice.choice(["model.safetensors", "model-1.safetensors"])
    if name == "model-1.safetensors":
        (folder / name).write_bytes(data)
        (folder / "model.safetensors").unlink()
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": name}}))
    assert weight_problems(folder) == []
    (folder / name).write_bytes(data[: dice.randrange(len(data))])
    (line,) = weight_problems(folder)
    assert line.startswith(f"{name} is missing or damaged") and "\n" not in line
    (folder / name).unlink()
    assert len(weight_problems(folder)) == 1


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"weight_map": 3}'])
def test_a_damaged_index_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(text)
    (line,) = weight_problems(tmp_path)
    assert line.startswith("model.safetensors")
