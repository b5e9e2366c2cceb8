"""Evaluation on held-out prompts does not change training; the best model is kept."""

import json
import os
import signal
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest

from tests.conftest import Task
from tests.integration.conftest import TIMEOUT_S, Run, Started, start

pytestmark = [pytest.mark.dist, pytest.mark.slow]
Runs = dict[str, Run]
STEPS = ["exp_ctrl.total_train_epochs=2", "exp_ctrl.total_train_steps=4", "exp_ctrl.save_freq_steps=1",
         "n_logged_generations=-1", "tensorboard.enabled=False"]  # fmt: skip
KEEP = ["exp_ctrl.eval_freq_steps=1", "exp_ctrl.keep_best=-eval/reward", "exp_ctrl.ckpt_freq_steps=1"]
ASYNC = "exp_ctrl.async_eval=True"


@pytest.fixture(scope="module")
def words(ppo_words: list[str], task: Task) -> list[str]:
    return [*ppo_words, *STEPS, f"dataset.eval_path={task.valid}"]


@pytest.fixture(scope="module")
def runs(
    realhf_all: Callable[..., Runs], ppo_words: list[str], words: list[str], tmp_path_factory: pytest.TempPathFactory
) -> Runs:
    sampled = ["evaluation.greedy=False", "evaluation.n=3", "exp_ctrl.eval_at_start=False"]
    cut = ["n_gpus_per_node=2", "allocation_mode=actor_gen:d2,actor_train:p2,*:d2", "exp_ctrl.eval_freq_steps=1"]
    apart = ["n_gpus_per_node=2", "allocation_mode=actor_gen:d1@0,*:d1@1", "exp_ctrl.eval_freq_steps=1"]
    variants = {"tried": KEEP, "sampled": sampled, "cut": cut, "without": ["dataset.eval_path=''"],
                "async": [*KEEP, ASYNC], "apart": apart, "async_apart": [*apart, ASYNC],
                "ahead": [*apart, "max_staleness=1"], "async_ahead": [*apart, "max_staleness=1", ASYNC]}  # fmt: skip
    return realhf_all("ppo-math", tmp_path_factory.mktemp("tried"), variants, words)


def weights(run: Run) -> dict[str, bytes]:
    return {str(p.relative_to(run.root)): p.read_bytes() for p in run.root.glob("models/*/*/model.safetensors")}


def of_training(run: Run) -> list[dict[str, float]]:
    return [{k: v for k, v in line.items() if not k.startswith("eval")} for line in run.curve if line["step"]]


def test_evaluation_does_not_change_training(runs: Runs) -> None:
    plain = runs["without"]
    assert len(weights(plain)) == 8 and "eval" not in str(plain.metrics)
    for name in ("tried", "sampled"):
        assert weights(runs[name]) == weights(plain) and of_training(runs[name]) == plain.curve
        assert all(runs[name].generations(step) == plain.generations(step) for step in (1, 2, 3, 4))


def test_files_of_an_evaluation(runs: Runs, task: Task) -> None:
    tried, sampled = runs["tried"], runs["sampled"]
    n = len(task.valid.read_text().splitlines())
    assert [found["step"] for found in tried.evaluations] == [0, 1, 2, 3, 4] == [line["step"] for line in tried.metrics]
    assert [found["step"] for found in sampled.evaluations] == [4]
    for found, line in zip(tried.evaluations, tried.metrics, strict=True):
        assert {**line, **found["metrics"]} == line and line["time/eval_s"] == found["seconds"]
        assert line["eval/prompts"] == n == found["counts"]["eval_rew/reward"]
        assert 1 <= line["eval/response_length"] <= 12 and line["eval/reward"] == line["eval_rew/reward"]
        assert f"eval    step {int(line['step'])}: reward {line['eval/reward']:.4f}" in tried.output
    assert sampled.evaluations[0]["counts"]["eval_rew/reward"] == 3 * n
    assert len({line["eval/reward"] for line in tried.metrics}) > 1


def test_evaluation_does_not_depend_on_the_layout(runs: Runs) -> None:
    for one, cut in zip(runs["tried"].evaluations, runs["cut"].evaluations, strict=True):
        assert one["counts"] == cut["counts"] and cut["metrics"] == pytest.approx(one["metrics"], rel=1e-4, abs=1e-6)


def timeless(run: Run) -> list[dict]:
    return [{**line, "seconds": 0} for line in run.evaluations]


@pytest.mark.parametrize("name", ["tried", "apart", "ahead"])
def test_asynchronous_evaluation_has_the_same_results(name: str, runs: Runs) -> None:
    plain, beside = runs[name], runs["async" if name == "tried" else f"async_{name}"]
    assert timeless(beside) == timeless(plain) and len(timeless(plain)) == 5
    assert beside.curve == plain.curve and weights(beside) == weights(plain)
    assert kept_weights(beside) == kept_weights(plain)
    assert all(beside.generations(step) == plain.generations(step) for step in (1, 2, 3, 4))
    for role, step in product(("actor", "critic"), (1, 2, 3, 4)):
        described = json.loads((beside.model(role, step) / "evaluation.json").read_text())
        assert {**described, "seconds": 0} == timeless(plain)[step]


def kept_weights(run: Run) -> dict[str, bytes]:
    files = (path for path in run.root.glob("best/**/*") if path.is_file() and path.name != "evaluation.json")
    return {str(path.relative_to(run.root)): path.read_bytes() for path in files}


def test_the_best_models_are_those_of_the_best_evaluation(runs: Runs) -> None:
    run = runs["tried"]
    values = [found["metrics"]["eval/reward"] for found in run.evaluations]
    pointer = json.loads((run.root / "best" / "best.json").read_text())
    best = min(values)  # this run minimises the metric: the first updates make these responses worse
    assert (pointer["value"], pointer["step"]) == (best, values.index(best)) and pointer["step"] > 0
    place = run.root / "best" / pointer["folder"]
    for role in ("actor", "critic"):
        assert json.loads((place / role / "evaluation.json").read_text())["step"] == pointer["step"]
        kept, saved = (folder / "model.safetensors" for folder in (place / role, run.model(role, pointer["step"])))
        assert kept.read_bytes() == saved.read_bytes()
    assert f"best    eval/reward {best:.4f} -> {place}" in run.output
    assert not list(run.root.glob("best/*unfinished*"))


def kill_when(started: Started, moment: Callable[[Path], bool]) -> None:
    end = time.monotonic() + TIMEOUT_S
    while not moment(started.root):
        assert started.process.poll() is None, "the run is over before it is killed"
        assert time.monotonic() < end, "the moment does not come"
        time.sleep(0.001)
    os.kill(started.process.pid, signal.SIGKILL)
    started.process.communicate(timeout=TIMEOUT_S)


def lines(root: Path) -> int:
    return len((root / "metrics.jsonl").read_text().splitlines()) if (root / "metrics.jsonl").exists() else 0


@pytest.mark.parametrize("more", [[], [ASYNC]])
def test_a_kill_while_the_best_model_is_saved_does_not_change_the_result(
    more: list[str], runs: Runs, words: list[str], tmp_path: Path
) -> None:
    started = start("ppo-math", tmp_path, [*words, *KEEP, *more])
    kill_when(started, lambda root: lines(root) >= 3 and (root / "checkpoints" / "latest").exists())
    pointer = json.loads((started.root / "best" / "best.json").read_text())
    assert (started.root / "best" / pointer["folder"] / "actor" / "model.safetensors").is_file()
    (started.root / "best" / "step_2.unfinished" / "actor").mkdir(parents=True, exist_ok=True)  # an incomplete file
    found = start("", started.root, [], command=["resume", str(started.root)]).finish()
    assert found.code == 0, found.output
    whole = runs["tried"]
    assert found.curve == whole.curve and weights(found) == weights(whole)
    assert timeless(found) == timeless(whole)
    assert kept_weights(found) == kept_weights(whole) != {}
