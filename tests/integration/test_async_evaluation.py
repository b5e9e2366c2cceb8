"""An evaluation during the next step has the results of one between the steps, in other experiments than PPO."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Task
from tests.integration.conftest import Run, Started

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


def same_results(runs: Runs) -> None:
    """Compare metrics, evaluations and saved weights."""
    plain, beside = runs["plain"], runs["beside"]
    assert beside.curve == plain.curve and plain.curve
    results: list[list[dict[str, Any]]] = [[{**x, "seconds": 0} for x in run.evaluations] for run in (plain, beside)]
    assert results[0] == results[1] and len(results[0]) == len(plain.curve)
    weights = [{str(p.relative_to(run.root)): p.read_bytes() for p in run.root.glob("models/*/*/model.safetensors")}
               for run in (plain, beside)]  # fmt: skip
    assert weights[0] == weights[1] != {}


def test_supervised(
    realhf_all: Callable[..., Runs], sft_words: list[str], tmp_path: Path
) -> None:  # every call of a step reads or changes the weights
    words = [*sft_words, *ALL, "dataset.eval_fraction=0.3", "n_gpus_per_node=2"]
    same_results(realhf_all("sft", tmp_path, {"plain": [], "beside": [ASYNC]}, words))


def test_filtered_prompts_and_an_average(
    realhf_all: Callable[..., Runs], ppo_words: list[str], reward_file: Path, task: Task, tmp_path: Path
) -> None:
    words = [*ppo_words, *ALL, *FILTERED, f"reward.fn={reward_file}:rare", f"dataset.eval_path={task.valid}"]
    same_results(realhf_all("grpo", tmp_path, {"plain": [], "beside": [ASYNC]}, words))


def test_a_reward_that_fails_on_held_out_rows_ends_the_run(
    realhf_start: Callable[..., Started], ppo_words: list[str], task: Task, tmp_path: Path
) -> None:
    names = [json.loads(line)["query_id"] for line in task.valid.read_text().splitlines()]
    (tmp_path / "unfair.py").write_text(UNFAIR.format(names=set(names)))
    words = [*ppo_words, *ALL, ASYNC, f"reward.fn={tmp_path}/unfair.py:held_out", f"dataset.eval_path={task.valid}",
             "n_gpus_per_node=2", "allocation_mode=actor_gen:d1@0,*:d1@1"]  # fmt: skip
    run = realhf_start("ppo-math", tmp_path, words).finish()
    assert run.code != 0 and "eval_rew of an evaluation: " in run.output and "no such row" in run.output


def test_without_held_out_rows_the_option_is_refused(
    realhf_start: Callable[..., Started], ppo_words: list[str], tmp_path: Path
) -> None:
    run = realhf_start("ppo-math", tmp_path, [*ppo_words, ASYNC]).finish()
    assert run.code != 0 and "exp_ctrl.async_eval=True: there are no held-out rows" in run.output
