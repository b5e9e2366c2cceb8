"""Multi-stage experiments that are killed in any stage end with the same results."""

import json
import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.conftest import TIMEOUT_S, Task
from tests.integration.conftest import TIMING_METRICS, Run, Started, start
from tests.integration.test_failures import no_process_remains

pytestmark = [pytest.mark.dist, pytest.mark.slow]
LiveProcesses = Callable[[Path], dict[int, str]]
STAGES = ("round1-sample", "round1-fit", "round1-valid")


@pytest.fixture(scope="module")
def words(actor_folder: Path, reward_file: Path, task: Task) -> list[str]:
    return [f"model.path={actor_folder}", f"dataset.path={task.train}", f"valid_path={task.valid}", "n_rounds=1",
            f"reward.fn={reward_file}:graded", "threshold=-1", "sampling.n=2", "sampling.max_new_tokens=8", "epochs=2",
            "validation.n=4", "validation.max_new_tokens=8", "fit_batch=8", "dataset.train_bs_n_seqs=3",
            "exp_ctrl.ckpt_freq_steps=1", "tensorboard.enabled=False"]  # fmt: skip


@pytest.fixture(scope="module")
def whole(words: list[str], tmp_path_factory: pytest.TempPathFactory) -> Run:
    run = start("restem", tmp_path_factory.mktemp("whole"), words).finish(TIMEOUT_S)
    assert run.code == 0, run.output
    return run


def remains(root: Path) -> dict[str, object]:
    """Results that do not depend on an interruption."""
    files = [*root.glob("*.jsonl"), *root.glob("*/models/*/*/model.safetensors"), *root.glob("*/generations/*.jsonl")]
    found: dict[str, object] = {str(path.relative_to(root)): path.read_bytes() for path in files}
    for path in root.glob("*/metrics.jsonl"):
        lines = map(json.loads, path.read_text().splitlines())
        curve = [{k: v for k, v in line.items() if not k.startswith(TIMING_METRICS)} for line in lines]
        found[str(path.relative_to(root))] = curve
    return found | {"result": json.loads((root / "restem.json").read_text().replace(str(root), "ROOT"))}


def kill_at(started: Started, file: Path) -> None:
    """Send SIGKILL once a file exists."""
    end = time.monotonic() + TIMEOUT_S
    while not file.exists():
        assert started.process.poll() is None, started.process.communicate()[0]
        assert time.monotonic() < end, f"there is no {file}"
        time.sleep(0.005)
    started.process.kill()
    started.process.communicate(timeout=TIMEOUT_S)


def go_on(root: Path, words: Sequence[str] = ()) -> Started:
    return start("", root, words, command=["resume", str(root)])


def test_a_kill_in_every_stage_does_not_change_the_result(
    whole: Run, words: list[str], live_processes: LiveProcesses, tmp_path: Path
) -> None:
    started = start("restem", tmp_path, words)
    root = started.root
    for stage in STAGES:
        kill_at(started, root / stage / "plan.json")  # no checkpoint: the stage restarts
        assert no_process_remains(root, live_processes)
        kill_at(go_on(root), root / stage / "checkpoints" / "latest")
        assert no_process_remains(root, live_processes)
        started = go_on(root)
    found = started.finish(TIMEOUT_S)
    assert found.code == 0, found.output
    assert "stage   round1-fit: already completed\nstage   round1-valid: gen\nresume  " in found.output, found.output
    assert remains(root) == remains(whole.root)
    again = go_on(root).finish()
    assert again.code == 0 and again.output.count("already completed") == 3 and remains(root) == remains(whole.root)


def test_a_multi_stage_experiment_rejects_other_options_and_resumes(
    words: list[str], live_processes: LiveProcesses, tmp_path: Path
) -> None:
    started = start("restem", tmp_path, [*words, "recover_mode=auto"])
    kill_at(started, started.root / "round1-sample" / "checkpoints" / "latest")
    other = go_on(started.root, ["threshold=0.5"]).finish()
    assert other.code == 2 and "threshold: -1.0 at the checkpoint, 0.5 now" in other.output, other.output
    assert no_process_remains(started.root, live_processes)
    started = start("restem", tmp_path, [*words, "recover_mode=auto", "n_gpus_per_node=2"])
    kill_worker(started, "round1-fit", live_processes)  # it restarts automatically
    run = started.finish(TIMEOUT_S)
    assert run.code == 0 and "resume  " in run.output and "0 restarts are left" in run.output, run.output
    assert json.loads((run.root / "restem.json").read_text())["chosen"] == 1


def kill_worker(started: Started, stage: str, live_processes: LiveProcesses) -> None:
    latest, end = started.root / stage / "checkpoints" / "latest", time.monotonic() + TIMEOUT_S
    while not latest.exists():
        assert started.process.poll() is None and time.monotonic() < end, "the stage is over before"
        time.sleep(0.005)
    words = f"realhf.apps.worker {(started.root / stage).resolve()} "
    os.kill(next(pid for pid, command in live_processes(started.root).items() if words in command), signal.SIGKILL)
