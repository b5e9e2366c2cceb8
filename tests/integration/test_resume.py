"""Runs that are killed and resumed have the results of uninterrupted runs."""

import json
import os
import re
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import Task
from tests.integration.conftest import TIMEOUT_S, Run, Started, same_curve, start

pytestmark = [pytest.mark.dist, pytest.mark.slow]
CALLS = ("actor_gen", "rew_inf", "ref_inf", "critic_inf", "critic_train", "actor_train")
OFTEN = ["exp_ctrl.ckpt_freq_steps=1", "exp_ctrl.total_train_epochs=2", "exp_ctrl.total_train_steps=5",
         "tensorboard.enabled=False", "n_logged_generations=-1"]  # fmt: skip
TWO = ["n_gpus_per_node=2", "ppo.use_adaptive_kl_ctl=True"]


def resume(root: Path, *words: str) -> Run:
    """Run ``realhf resume``."""
    return start("", root, words, command=["resume", str(root)]).finish()


def files(run: Run) -> dict[str, bytes]:
    """Files that are equal byte for byte after an interruption."""
    kept = [*run.root.glob("models/*/*/model.safetensors"), *run.root.glob("generations/*.jsonl")]
    return {str(path.relative_to(run.root)): path.read_bytes() for path in sorted(kept)}


def kill(started: Started, step: int, whom: str) -> None:
    """Send SIGKILL after the metrics of ``step`` are written."""
    metrics, end = started.root / "metrics.jsonl", time.monotonic() + TIMEOUT_S
    while not metrics.exists() or len(metrics.read_text().splitlines()) < step:
        assert started.process.poll() is None and time.monotonic() < end, "the run is over before it is killed"
        time.sleep(0.01)
    if whom == "master":
        started.process.kill()
    else:
        workers = [int(pid) for pid in os.listdir("/proc") if pid.isdigit() and is_worker(int(pid), started.root)]
        os.kill(min(workers), signal.SIGKILL)
    started.process.communicate(timeout=TIMEOUT_S)


def is_worker(pid: int, root: Path) -> bool:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").split()
    except OSError:
        return False
    return b"realhf.apps.worker" in words and str(root).encode() in words


@pytest.fixture(scope="module")
def whole(realhf: Callable[..., Run], ppo_words: list[str], tmp_path_factory: pytest.TempPathFactory) -> Run:
    return realhf("ppo-math", tmp_path_factory.mktemp("whole"), [*ppo_words, *OFTEN, *TWO])


@pytest.fixture(scope="module")
def stopped(ppo_words: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was killed after four steps, with two valid checkpoints."""
    started = start("ppo-math", tmp_path_factory.mktemp("stopped"), [*ppo_words, *OFTEN, *TWO])
    kill(started, 4, "master")
    return started.root


def copy_of(root: Path, folder: Path) -> Path:
    return Path(shutil.copytree(root, folder / "t" / "trial"))


@pytest.mark.parametrize("whom", ["master", "worker"])
def test_two_kills_do_not_change_the_result(whom: str, whole: Run, ppo_words: list[str], tmp_path: Path) -> None:
    started = start("ppo-math", tmp_path, [*ppo_words, *OFTEN, *TWO])
    kill(started, 3, whom)  # once a step's metrics are written, the checkpoint of the step before it is valid
    kill(start("", started.root, [], command=["resume", str(started.root)]), 4, whom)
    found = resume(started.root)
    assert found.code == 0, found.output
    assert found.curve == whole.curve and files(found) == files(whole)
    assert len(files(whole)) == 7  # two models, five steps of generations


def test_sft_resumes_bitwise(realhf: Callable[..., Run], sft_words: list[str], tmp_path: Path) -> None:
    straight = realhf("sft", tmp_path / "straight", [*sft_words, *OFTEN])
    started = start("sft", tmp_path / "killed", [*sft_words, *OFTEN])
    kill(started, 3, "master")
    found = resume(started.root)
    assert found.code == 0 and found.curve == straight.curve and files(found) == files(straight)


def test_resampling_resumes_bitwise(
    realhf: Callable[..., Run], ppo_words: list[str], reward_file: Path, tmp_path: Path
) -> None:
    words = [*ppo_words, *OFTEN, "ppo.dynamic_sampling=True", f"reward.fn={reward_file}:rare", "ppo.group_size=3",
             "critic.optimizer.lr=1e-5"]  # fmt: skip
    straight = realhf("grpo", tmp_path / "straight", words)
    assert max(line["prompts/sampled"] for line in straight.metrics) > 7
    started = start("grpo", tmp_path / "killed", words)
    kill(started, 3, "master")
    found = resume(started.root)
    assert found.code == 0, found.output
    assert found.curve == straight.curve and files(found) == files(straight)


@pytest.mark.parametrize("words", [["max_staleness=1"], ["max_staleness=2", "exp_ctrl.eval_at_start=False"]])
def test_rollout_ahead_resumes_bitwise(
    words: list[str], realhf: Callable[..., Run], ppo_words: list[str], tmp_path: Path
) -> None:
    """Rows that were generated before the checkpoint with older weights are part of it."""
    words = [*ppo_words, *OFTEN, *TWO, *words, *generating_on(0),
             "exp_ctrl.total_train_steps=8", "exp_ctrl.total_train_epochs=4"]  # fmt: skip
    straight = realhf("ppo-math", tmp_path / "straight", words)
    started = start("ppo-math", tmp_path / "killed", words)
    kill(started, 3, "master")
    assert any("@rows" in path.name for path in started.root.glob("checkpoints/step_*/*"))
    kill(start("", started.root, [], command=["resume", str(started.root)]), 5, "worker")
    found = resume(started.root)
    assert found.code == 0, found.output
    assert found.curve == straight.curve and files(found) == files(straight)


def generating_on(rank: int) -> list[str]:
    """Return the options to generate on one of two workers and to train on the other."""
    return ["allocation_mode=manual", *(f"{c}.device_mesh={rank if c == CALLS[0] else 1 - rank}" for c in CALLS)]


def test_rollout_ahead_resumes_in_other_layouts(
    realhf: Callable[..., Run], ppo_words: list[str], tmp_path: Path
) -> None:
    """Stored rows are found in any layout, and stored again by the worker that has read them."""
    words = [*ppo_words, *OFTEN, *TWO, "max_staleness=2", *generating_on(0), "exp_ctrl.total_train_epochs=3",
             "exp_ctrl.total_train_steps=6", "actor.optimizer.lr=1e-4", "critic.optimizer.lr=1e-4"]  # fmt: skip
    straight = realhf("ppo-math", tmp_path / "straight", words)
    started = start("ppo-math", tmp_path / "killed", words)
    kill(started, 3, "master")
    kill(start("", started.root, generating_on(1), command=["resume", str(started.root)]), 4, "master")
    found = resume(started.root, "allocation_mode=d2", *(f"{call}.device_mesh=null" for call in CALLS))
    assert found.code == 0, found.output
    assert same_curve(straight, found) == []


@pytest.mark.parametrize("layout", ["d1", "t2", "p2"])
def test_a_run_resumes_in_another_layout_with_the_same_curve(
    layout: str, stopped: Path, whole: Run, tmp_path: Path
) -> None:
    workers = 1 if layout == "d1" else 2
    found = resume(copy_of(stopped, tmp_path), f"n_gpus_per_node={workers}", f"allocation_mode={layout}")
    assert found.code == 0, found.output
    assert same_curve(whole, found) == []
    for step in range(1, 6):
        assert [row["response"] for row in found.generations(step)] == [
            row["response"] for row in whole.generations(step)
        ]


def test_a_truncated_shard_is_skipped(stopped: Path, whole: Run, tmp_path: Path) -> None:
    root = copy_of(stopped, tmp_path)
    last = root / "checkpoints" / (root / "checkpoints" / "latest").read_text()
    os.truncate(last / "actor.0.safetensors", 1000)
    found = resume(root)
    assert found.code == 0 and "damaged" in found.output and "actor.0.safetensors has 1000 bytes" in found.output
    assert found.curve == whole.curve and files(found) == files(whole)


def test_resume_rejects_changed_options(stopped: Path, tmp_path: Path) -> None:
    root = copy_of(stopped, tmp_path)
    options = resume(root, "ppo.kl_ctl=0.2", "seed=5")
    assert options.code == 2
    assert (
        "ppo.kl_ctl: 0.05 at the checkpoint, 0.2 now" in options.output
        and "seed: 1 at the checkpoint" in options.output
    )
    typo = resume(root, "exp_ctrl.total_steps=3")
    assert typo.code == 2 and "did you mean exp_ctrl.total_train_steps" in typo.output
    part = resume(root, "resume.accept=[rewards_file]")
    assert part.code == 2 and "did you mean reward_file" in part.output
    nothing = resume(tmp_path)
    assert nothing.code == 2 and "has no run" in nothing.output
    shutil.rmtree(root / "checkpoints")
    none = resume(root)
    assert none.code == 2 and "contains no checkpoint" in none.output
    assert len((root / "metrics.jsonl").read_text().splitlines()) == 4, "nothing was touched"


def test_every_changed_file_is_refused_or_accepted_by_name(
    task: Task, actor_folder: Path, reward_file: Path, ppo_words: list[str], tmp_path: Path
) -> None:
    """All files of the run are copies, so that they can be edited."""
    reward, data, held_out, model = (tmp_path / name for name in ("rewards.py", "train.jsonl", "valid.jsonl", "model"))
    reward.write_text("import scale\n" + reward_file.read_text())
    (tmp_path / "scale.py").write_text("SCALE = 1\n")
    shutil.copy(task.train, data)
    shutil.copy(task.valid, held_out)
    shutil.copytree(actor_folder, model)
    words = [*ppo_words, *OFTEN, f"reward.fn={reward}:graded", f"dataset.path={data}", f"dataset.eval_path={held_out}",
             f"actor.path={model}"]  # fmt: skip
    started = start("grpo", tmp_path, words)
    kill(started, 4, "master")  # with the evaluation before the first step
    root, weights = started.root, model / "model.safetensors"
    rows = data.read_text().splitlines(keepends=True)
    edits: dict[str, tuple[Path, bytes]] = {
        "reward_file": (tmp_path / "scale.py", b"SCALE = 2\n"),
        "data": (data, "".join([rows[1], rows[0], *rows[2:]]).encode()),
        "eval_data": (held_out, "".join(held_out.read_text().splitlines(keepends=True)[1:]).encode()),
        "models": (weights, weights.read_bytes()[:-1] + b"!"),
    }
    originals = {path: path.read_bytes() for path, _ in edits.values()}
    for part, (path, content) in edits.items():
        path.write_bytes(content)
        refused = resume(root, "resume.accept=[code,lr_schedule]")
        assert refused.code == 2 and f"{part} has changed" in refused.output, refused.output
        assert f"resume.accept=[{part}] accepts it" in refused.output
        assert re.findall(r"(\w+) has changed", refused.output) == [part]
        path.write_bytes(originals[path])
    longer = resume(root, "exp_ctrl.total_train_steps=4")
    assert longer.code == 2
    assert "exp_ctrl.total_train_steps 5 -> 4 changes the learning-rate schedule of actor (cosine)" in longer.output
    reward.write_text(reward.read_text() + "# edited\n")
    accepted = resume(root, "exp_ctrl.total_train_steps=4", "resume.accept=[lr_schedule,reward_file]")
    assert accepted.code == 0, accepted.output
    assert "accept  reward_file has changed" in accepted.output
    (manifest,) = (json.loads(path.read_text()) for path in root.glob("checkpoints/step_4/manifest.json"))
    assert sorted(part for _, part in manifest["accepted"]) == ["lr_schedule", "reward_file"]
    again = resume(root)
    assert again.code == 0 and "accept" not in again.output, "the last checkpoint has the accepted files"


def test_a_failed_run_restarts_automatically(ppo_words: list[str], whole: Run, tmp_path: Path) -> None:
    started = start("ppo-math", tmp_path, [*ppo_words, *OFTEN, *TWO, "recover_mode=fault"])
    metrics, end = started.root / "metrics.jsonl", time.monotonic() + TIMEOUT_S
    while not metrics.exists() or len(metrics.read_text().splitlines()) < 3:
        assert time.monotonic() < end
        time.sleep(0.01)
    os.kill(min(int(p) for p in os.listdir("/proc") if p.isdigit() and is_worker(int(p), started.root)), signal.SIGKILL)
    found = started.finish()
    assert found.code == 0 and "was ended by SIGKILL" in found.output and "0 restarts are left" in found.output
    assert found.curve == whole.curve and files(found) == files(whole)
    assert json.loads((found.root / "plan.json").read_text())["experiment"] == "ppo-math"
