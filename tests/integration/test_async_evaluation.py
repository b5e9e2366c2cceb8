"""An evaluation during the next step has the results of one between the steps, in other experiments than PPO."""

import json
import time
from collections.abc import Callable
from itertools import zip_longest
from pathlib import Path

import pytest

from tests.conftest import Task
from tests.integration.conftest import TIMEOUT_S, Run, Started, start
from tests.integration.kills import differences
from tests.integration.test_resume import kill, resume

pytestmark = [pytest.mark.dist, pytest.mark.slow]
Runs = dict[str, Run]
ALL = ["exp_ctrl.eval_freq_steps=1", "exp_ctrl.save_freq_steps=1", "tensorboard.enabled=False"]
ASYNC = "exp_ctrl.async_eval=True"
FILTERED = ["ppo.dynamic_sampling=True", "ppo.actor_ema_eta=0.5", "max_staleness=1", "n_gpus_per_node=2",
            "allocation_mode=actor_gen:d1@0,*:d1@1", "actor_gen.prompts_per_call=3",
            "exp_ctrl.keep_best=eval/reward", "exp_ctrl.ckpt_freq_steps=1", "exp_ctrl.total_train_epochs=2",
            "exp_ctrl.total_train_steps=4"]  # fmt: skip
UNFAIR = """
def held_out(prompt, answer, row):
    if row["query_id"] in {names}:
        raise KeyError("no such row")
    return 0.5
"""

SLOW = """
import os, time
def held_out(prompt, answer, row):
    if row["query_id"] in {names} and "VERDICTS" in os.environ:
        with open(os.environ["VERDICTS"], "a") as file:
            file.write("x")
        time.sleep(0.1)
    return (answer.count("1") - len(answer) / 4) / 8
"""


def changes(runs: Runs) -> list[str]:
    """Return what an evaluation during the next step changes: metrics, files and evaluations."""
    plain, beside = runs["plain"], runs["beside"]
    assert len(plain.evaluations) == len(plain.curve) > 2
    return differences(plain, beside) + changed_evaluations(plain, beside)


def changed_evaluations(one: Run, other: Run) -> list[str]:
    pairs = zip_longest(one.evaluations, other.evaluations, fillvalue={})
    return [f"evaluation {i}" for i, (a, b) in enumerate(pairs) if {**a, "seconds": 0} != {**b, "seconds": 0}]


def test_supervised(realhf_all: Callable[..., Runs], sft_words: list[str], tmp_path: Path) -> None:
    """Every call of a step changes the weights."""
    words = [*sft_words, *ALL, "dataset.eval_fraction=0.3", "n_gpus_per_node=2"]
    assert changes(realhf_all("sft", tmp_path, {"plain": [], "beside": [ASYNC]}, words)) == []


def test_filtered_prompts_and_an_average(
    realhf_all: Callable[..., Runs], ppo_words: list[str], reward_file: Path, task: Task, tmp_path: Path
) -> None:
    words = [*ppo_words, *ALL, *FILTERED, f"reward.fn={reward_file}:rare", f"dataset.eval_path={task.valid}"]
    assert changes(realhf_all("grpo", tmp_path, {"plain": [], "beside": [ASYNC]}, words)) == []


def test_a_reward_that_fails_on_held_out_rows_ends_the_run(
    realhf_start: Callable[..., Started], ppo_words: list[str], task: Task, tmp_path: Path
) -> None:
    names = [json.loads(line)["query_id"] for line in task.valid.read_text().splitlines()]
    (tmp_path / "unfair.py").write_text(UNFAIR.format(names=set(names)))
    words = [*ppo_words, *ALL, ASYNC, f"reward.fn={tmp_path}/unfair.py:held_out", f"dataset.eval_path={task.valid}",
             "n_gpus_per_node=2", "allocation_mode=actor_gen:d1@0,*:d1@1"]  # fmt: skip
    run = realhf_start("ppo-math", tmp_path, words).finish()
    assert run.code != 0 and "eval_rew of an evaluation: " in run.output and "no such row" in run.output


@pytest.fixture(scope="module")
def slow_words(ppo_words: list[str], task: Task, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("slow")
    names = {json.loads(line)["query_id"] for line in task.valid.read_text().splitlines()}
    (folder / "slow.py").write_text(SLOW.format(names=names))
    return [*ppo_words, *ALL, f"reward.fn={folder}/slow.py:held_out", f"dataset.eval_path={task.valid}",
            "exp_ctrl.ckpt_freq_steps=1", "exp_ctrl.keep_last=1", "exp_ctrl.total_train_epochs=2",
            "n_gpus_per_node=2", "allocation_mode=actor_gen:d1@0,*:d1@1"]  # fmt: skip


@pytest.fixture(scope="module")
def whole(realhf: Callable[..., Run], slow_words: list[str], tmp_path_factory: pytest.TempPathFactory) -> Run:
    return realhf("ppo-math", tmp_path_factory.mktemp("whole"), slow_words)


@pytest.mark.parametrize("more", [[], ["exp_ctrl.keep_best=eval/reward"]], ids=["plain", "best"])
@pytest.mark.parametrize("end", ["master", "worker", "stop"])
def test_an_end_during_an_evaluation_does_not_change_the_result(
    end: str, more: list[str], whole: Run, slow_words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The third evaluation is in progress, beside the training of the third step unless the best model is kept."""
    monkeypatch.setenv("VERDICTS", str(verdicts := tmp_path / "verdicts"))
    started = start("ppo-math", tmp_path, [*slow_words, *more, ASYNC])
    deadline = time.monotonic() + TIMEOUT_S
    while not verdicts.exists() or len(verdicts.read_text()) < 12:  # five held-out rows per evaluation
        assert started.process.poll() is None and time.monotonic() < deadline, "no third evaluation"
        time.sleep(0.005)
    if end == "stop":
        (started.root / "stop").touch()
        started.finish()
    else:
        kill(started, 0, end)
    found = resume(started.root)
    assert found.code == 0, found.output
    assert differences(whole, found) + changed_evaluations(whole, found) == []


def test_without_held_out_rows_the_option_is_refused(
    realhf_start: Callable[..., Started], ppo_words: list[str], tmp_path: Path
) -> None:
    run = realhf_start("ppo-math", tmp_path, [*ppo_words, ASYNC]).finish()
    assert run.code != 0 and "exp_ctrl.async_eval=True: there are no held-out rows" in run.output
