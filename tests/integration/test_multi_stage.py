"""Campaigns that are killed in any of their stages end as if they had been left in peace."""

import json
import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.conftest import Task
from tests.integration.conftest import OF_THE_CLOCK, Run, Started, start
from tests.integration.test_failures import nothing_is_left

pytestmark = [pytest.mark.dist, pytest.mark.slow]
Living = Callable[[Path], dict[int, str]]
PATIENCE_S = 360.0  # for three runs, one after the other
STAGES = ("round1-sample", "round1-fit", "round1-valid")


@pytest.fixture(scope="module")
def words(actor_folder: Path, reward_file: Path, task: Task) -> list[str]:
    return [f"model.path={actor_folder}", f"dataset.path={task.train}", f"valid_path={task.valid}", "n_rounds=1",
            f"reward.fn={reward_file}:graded", "threshold=-1", "sampling.n=2", "sampling.max_new_tokens=8", "epochs=2",
            "validation.n=4", "validation.max_new_tokens=8", "fit_batch=8", "dataset.train_bs_n_seqs=3",
            "exp_ctrl.ckpt_freq_steps=1", "tensorboard.enabled=False"]  # fmt: skip


@pytest.fixture(scope="module")
def whole(words: list[str], tmp_path_factory: pytest.TempPathFactory) -> Run:
    run = start("restem", tmp_path_factory.mktemp("whole"), words).finish(PATIENCE_S)
    assert run.code == 0, run.said
    return run


def remains(root: Path) -> dict[str, object]:
    """What must not depend on an interruption."""
    files = [*root.glob("*.jsonl"), *root.glob("*/models/*/*/model.safetensors"), *root.glob("*/generations/*.jsonl")]
    found: dict[str, object] = {str(path.relative_to(root)): path.read_bytes() for path in files}
    for path in root.glob("*/metrics.jsonl"):
        lines = map(json.loads, path.read_text().splitlines())
        curve = [{k: v for k, v in line.items() if not k.startswith(OF_THE_CLOCK)} for line in lines]
        found[str(path.relative_to(root))] = curve
    return found | {"result": json.loads((root / "restem.json").read_text().replace(str(root), "ROOT"))}


def kill_at(started: Started, file: Path) -> None:
    """Kill without a warning when a file is there."""
    end = time.monotonic() + PATIENCE_S
    while not file.exists():
        assert started.process.poll() is None, started.process.communicate()[0]
        assert time.monotonic() < end, f"there is no {file}"
        time.sleep(0.005)
    started.process.kill()
    started.process.communicate(timeout=60)


def go_on(root: Path, words: Sequence[str] = ()) -> Started:
    return start("", root, words, command=["resume", str(root)])


def test_killed_in_every_stage_and_still_the_same_to_the_bit(
    whole: Run, words: list[str], living: Living, tmp_path: Path
) -> None:
    started = start("restem", tmp_path, words)
    root = started.root
    for stage in STAGES:
        kill_at(started, root / stage / "plan.json")  # no checkpoint: the stage starts again
        assert nothing_is_left(root, living)
        kill_at(go_on(root), root / stage / "checkpoints" / "latest")
        assert nothing_is_left(root, living)
        started = go_on(root)
    found = started.finish(PATIENCE_S)
    assert found.code == 0, found.said
    assert "stage   round1-fit: already completed\nstage   round1-valid: gen\nresume  " in found.said, found.said
    assert remains(root) == remains(whole.root)
    again = go_on(root).finish()
    assert again.code == 0 and again.said.count("already completed") == 3 and remains(root) == remains(whole.root)


def test_what_a_campaign_refuses_and_what_it_goes_on_with(words: list[str], living: Living, tmp_path: Path) -> None:
    started = start("restem", tmp_path, [*words, "recover_mode=auto"])
    kill_at(started, started.root / "round1-sample" / "checkpoints" / "latest")
    other = go_on(started.root, ["threshold=0.5"]).finish()
    assert other.code == 2 and "threshold: -1.0 at the checkpoint, 0.5 now" in other.said, other.said
    assert nothing_is_left(started.root, living)
    started = start("restem", tmp_path, [*words, "recover_mode=auto", "n_gpus_per_node=2"])
    kill_worker(started, "round1-fit", living)  # which starts again by itself
    run = started.finish(PATIENCE_S)
    assert run.code == 0 and "resume  " in run.said and "0 restarts are left" in run.said, run.said
    assert json.loads((run.root / "restem.json").read_text())["chosen"] == 1


def kill_worker(started: Started, stage: str, living: Living) -> None:
    latest, end = started.root / stage / "checkpoints" / "latest", time.monotonic() + PATIENCE_S
    while not latest.exists():
        assert started.process.poll() is None and time.monotonic() < end, "the stage is over before"
        time.sleep(0.005)
    words = f"realhf.apps.worker {(started.root / stage).resolve()} "
    os.kill(next(pid for pid, command in living(started.root).items() if words in command), signal.SIGKILL)
