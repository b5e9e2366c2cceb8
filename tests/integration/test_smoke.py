"""Whole runs, one of each kind: the integration tests of ``make test``."""

import json
import os
import signal
from pathlib import Path

import pytest

from realhf.apps.commands.report import main as report
from tests.conftest import Task
from tests.integration.conftest import Run, run, same_curve, start
from tests.integration.test_resume import files, is_worker, kill, resume

pytestmark = pytest.mark.dist
INLINE = ["mode=inline", "tensorboard.enabled=False"]
TWO = ["n_gpus_per_node=2", "tensorboard.enabled=False"]
CHECKPOINTS = ["exp_ctrl.ckpt_freq_steps=1"]


@pytest.fixture(scope="module")
def inline(ppo_words: list[str], tmp_path_factory: pytest.TempPathFactory) -> Run:
    """PPO for three steps, master and worker in one process."""
    return run("ppo-math", tmp_path_factory.mktemp("inline"), [*ppo_words, *INLINE])


@pytest.fixture(scope="module")
def two_workers(ppo_words: list[str], tmp_path_factory: pytest.TempPathFactory) -> Run:
    return run("ppo-math", tmp_path_factory.mktemp("two"), [*ppo_words, *TWO, *CHECKPOINTS])


@pytest.fixture(scope="module")
def sft(sft_words: list[str], tmp_path_factory: pytest.TempPathFactory) -> Run:
    """SFT with evaluation, of which the best model is kept."""
    words = [*sft_words, *INLINE, "dataset.eval_fraction=0.25", "exp_ctrl.keep_best=-eval/loss"]
    return run("sft", tmp_path_factory.mktemp("sft"), words)


def test_ppo_trains_and_saves_its_models(inline: Run, actor_folder: Path) -> None:
    assert [line["step"] for line in inline.metrics] == [1, 2, 3]
    assert inline.metrics[0]["actor_train/grad_norm"] > 0 and inline.metrics[0]["critic_train/grad_norm"] > 0
    saved = inline.model("actor", 3) / "model.safetensors"
    assert saved.read_bytes() != (actor_folder / "model.safetensors").read_bytes()
    assert (inline.root / "config.yaml").is_file() and (inline.root / "trace.json").is_file()


def test_two_workers_give_the_same_curve(inline: Run, two_workers: Run) -> None:
    assert same_curve(inline, two_workers) == []


def test_a_sharded_layout_gives_the_same_curve(inline: Run, ppo_words: list[str], tmp_path: Path) -> None:
    layout = "allocation_mode=actor_gen:d2,actor_train:t2,critic_train:p2,*:d2"
    assert same_curve(inline, run("ppo-math", tmp_path, [*ppo_words, *TWO, layout])) == []


@pytest.mark.parametrize("process", ["master", "worker"])
def test_a_killed_run_resumes_bitwise(process: str, two_workers: Run, ppo_words: list[str], tmp_path: Path) -> None:
    started = start("ppo-math", tmp_path, [*ppo_words, *TWO, *CHECKPOINTS])
    started.wait_for_checkpoint()
    kill(started, 2, process)
    resumed = resume(started.root)
    assert resumed.code == 0, resumed.output
    assert resumed.curve == two_workers.curve and files(resumed) == files(two_workers)


def test_a_dead_worker_ends_the_run(ppo_words: list[str], tmp_path: Path) -> None:
    started = start("ppo-math", tmp_path, [*ppo_words, *TWO, "exp_ctrl.total_train_epochs=100"])
    started.wait_for_step()
    workers = [int(pid) for pid in os.listdir("/proc") if pid.isdigit() and is_worker(int(pid), started.root)]
    os.kill(min(workers), signal.SIGKILL)
    ended = started.finish()
    assert ended.code == 1 and "SIGKILL" in ended.output and "worker 0" in ended.output, ended.output


def test_sft_learns_and_keeps_its_best_model(sft: Run) -> None:
    losses = [found["metrics"]["eval/loss"] for found in sft.evaluations]
    assert len(losses) >= 2 and losses[-1] < losses[0]
    best = json.loads((sft.root / "best" / "best.json").read_text())
    assert best["value"] == pytest.approx(min(losses))


def test_dpo_starts_at_log_two_and_learns(task: Task, actor_folder: Path, tmp_path: Path) -> None:
    words = [f"actor.path={actor_folder}", f"dataset.path={task.root}/preferences.jsonl", "dataset.train_bs_n_seqs=5",
             "exp_ctrl.total_train_epochs=2", "actor.optimizer.lr=3e-3"]  # fmt: skip
    losses = [line["loss"] for line in run("dpo", tmp_path, [*words, *INLINE]).metrics]
    assert losses[0] == pytest.approx(0.6931, abs=1e-4) and losses[-1] < losses[0]


def test_a_reward_model_and_ppo_against_an_ensemble(
    task: Task, actor_folder: Path, ppo_words: list[str], tmp_path: Path
) -> None:
    words = [f"model.path={actor_folder}", f"dataset.path={task.root}/preferences.jsonl", "dataset.train_bs_n_seqs=8",
             "model.init_critic_from_actor=True", "exp_ctrl.total_train_steps=1", *INLINE]  # fmt: skip
    members = [run("rw", tmp_path / str(i), [*words, f"seed={i}"]).model("model", 1) for i in (1, 2)]
    ensemble = [f"ensemble.members=[{','.join(map(str, members))}]", "exp_ctrl.total_train_steps=1"]
    ppo = run("ppo", tmp_path, [*(w for w in ppo_words if not w.startswith("reward.")), *ensemble, *INLINE])
    assert ppo.metrics[0]["actor_train/grad_norm"] > 0


@pytest.mark.parametrize("experiment", ["grpo", "vineppo"])
def test_an_algorithm_without_a_critic(experiment: str, ppo_words: list[str], tmp_path: Path) -> None:
    few = ["exp_ctrl.total_train_steps=2", "critic.optimizer.lr=1e-5", "ppo.group_size=3", *INLINE]
    own = {"grpo": ["ppo.dynamic_sampling=True"], "vineppo": ["vine.n_rollouts=2", "vine.max_states=2"]}
    metrics = run(experiment, tmp_path, [*ppo_words, *few, *own[experiment]]).metrics
    assert len(metrics) == 2 and metrics[1]["actor_train/grad_norm"] > 0 and "critic_train/loss" not in metrics[1]


def test_programs_are_executed(ppo_words: list[str], tmp_path: Path) -> None:
    """A number is a program without output, which is the expected output here."""
    data = tmp_path / "code.jsonl"
    row = {"prompt": "1+2=", "input_output": json.dumps({"inputs": [""], "outputs": [""]})}
    data.write_text((json.dumps(row) + "\n") * 7)
    words = [word for word in ppo_words if not word.startswith(("dataset.path=", "reward.fn="))]
    ran = run("ppo-code", tmp_path, [*words, f"dataset.path={data}", "ppo.gen.max_new_tokens=3", *INLINE])
    assert ran.metrics[0]["rew_inf/verifier_error"] == 0.0 and ran.metrics[0]["rew_inf/accuracy"] > 0.0


def test_a_multi_stage_experiment(actor_folder: Path, reward_file: Path, task: Task, tmp_path: Path) -> None:
    words = [f"model.path={actor_folder}", f"dataset.path={task.train}", f"valid_path={task.valid}", "n_rounds=1",
             f"reward.fn={reward_file}:graded", "threshold=-1", "sampling.n=2", "sampling.max_new_tokens=8", "epochs=1",
             "validation.n=2", "validation.max_new_tokens=8", "fit_batch=8", "dataset.train_bs_n_seqs=5"]  # fmt: skip
    root = run("restem", tmp_path, [*words, *INLINE]).root
    assert json.loads((root / "restem.json").read_text())["chosen"] == 1
    report([str(root)])
    page, stages = (root / "report.html").read_text(), json.loads((root / "stages.json").read_text())["done"]
    assert len(stages) > 2 and page.count('<span class="pill done"') == len(stages)
    assert all(f"</i>{stage}</th>" in page for stage in stages)


def test_the_report_of_a_run(two_workers: Run, capsys: pytest.CaptureFixture[str]) -> None:
    report([str(two_workers.root)])
    page = (two_workers.root / "report.html").read_text()
    assert "Reward</h4>" in page and "actor_gen" in page and "Measured: step 3, " in page


def test_invalid_options_launch_nothing(ppo_words: list[str], tmp_path: Path) -> None:
    started = start("ppo-math", tmp_path, [*ppo_words, "ppo.eps_clp=0.1"])
    ended = started.finish()
    assert ended.code == 2 and "did you mean ppo.eps_clip" in ended.output and not started.root.exists()
