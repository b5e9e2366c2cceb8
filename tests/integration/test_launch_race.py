"""Two launches into one run directory at the same time: one is refused, and the other is not affected.

``RACE_ROUNDS`` is the number of races of each kind.
"""

import hashlib
import os
import random
import shutil
import time
from pathlib import Path

import pytest

from tests.integration.conftest import Run, Started, run, start

pytestmark = [pytest.mark.dist, pytest.mark.slow]
ROUNDS = int(os.environ.get("RACE_ROUNDS", "1"))
MAX_GAP_S = 2.0
STEPS = ["exp_ctrl.total_train_epochs=100", "exp_ctrl.total_train_steps=200", "n_gpus_per_node=2",
         "tensorboard.enabled=False", "exp_ctrl.ckpt_freq_steps=50", "exp_ctrl.keep_last=0"]  # fmt: skip
"""The run takes longer than the gap."""
RACERS = {"first": ["model.optimizer.lr=1e-3"], "second": ["model.optimizer.lr=4e-3"]}
RESUMED = {"first": ["allocation_mode=d2"], "second": ["allocation_mode=d1t2"]}


def results(root: Path) -> dict[str, str]:
    """Return the digests of a run's weights and of its configuration, which must not depend on its location."""
    parent = str(root.parents[1])
    texts = {name: (root / name).read_text().replace(parent, "") for name in ("config.yaml", "plan.json")}
    weights = {
        str(file.relative_to(root)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in root.glob("models/*/*/*.safetensors")
    }
    assert weights
    return weights | {
        name: "\n".join(sorted(line for line in text.splitlines() if '"launch":' not in line))
        for name, text in texts.items()
    }


def race(racers: dict[str, Started], gap_s: float) -> tuple[str, Run]:
    """Return the name of the launch that was not refused, and its run."""
    runs = {name: each.finish() for name, each in racers.items()}
    winners = [name for name, each in runs.items() if each.code == 0]
    outputs = f"gap {gap_s:.3f} s\n" + "\n".join(f"{name}: {each.code}\n{each.output}" for name, each in runs.items())
    assert len(winners) == 1, outputs
    (loser,) = (each for name, each in runs.items() if name != winners[0])
    assert loser.code == 2 and "has a run in progress" in loser.output and "Traceback" not in loser.output, outputs
    return winners[0], runs[winners[0]]


@pytest.mark.parametrize("overwrite", [False, True])
def test_two_new_launches(overwrite: bool, sft_words: list[str], tmp_path: Path) -> None:
    words = [*sft_words, *STEPS, f"overwrite={overwrite}"]
    alone = {name: results(run("sft", tmp_path / name, [*words, *more]).root) for name, more in RACERS.items()}
    assert alone["first"] != alone["second"]
    rng = random.Random(int(overwrite))
    for number in range(ROUNDS):
        folder, gap_s = tmp_path / f"round{number}", rng.uniform(0, MAX_GAP_S)
        if overwrite:
            shutil.copytree(tmp_path / "first", folder)  # an earlier run
        racers = {}
        for name, more in RACERS.items():
            racers[name] = start("sft", folder, [*words, *more])
            time.sleep(gap_s if name == "first" else 0.0)
        winner, found = race(racers, gap_s)
        assert results(found.root) == alone[winner]


def test_two_resumes_with_different_allocations(sft_words: list[str], tmp_path: Path) -> None:
    base = run("sft", tmp_path / "base", [*sft_words, *STEPS, *RACERS["first"]]).root
    for number in (100, 150, 200):
        shutil.rmtree(base / "checkpoints" / f"step_{number}", ignore_errors=True)
    rng = random.Random(2)

    def resumed(folder: Path, name: str) -> Started:
        return start("", folder, RESUMED[name], ["resume", str(folder / "t" / "trial")])

    alone = {}
    for name in RESUMED:
        shutil.copytree(tmp_path / "base", tmp_path / name)
        assert resumed(tmp_path / name, name).finish().code == 0
        alone[name] = results(tmp_path / name / "t" / "trial")
    for number in range(ROUNDS):
        folder, gap_s = tmp_path / f"round{number}", rng.uniform(0, MAX_GAP_S)
        shutil.copytree(tmp_path / "base", folder)
        racers = {}
        for name in RESUMED:
            racers[name] = resumed(folder, name)
            time.sleep(gap_s if name == "first" else 0.0)
        winner, _ = race(racers, gap_s)
        assert results(folder / "t" / "trial") == alone[winner]
