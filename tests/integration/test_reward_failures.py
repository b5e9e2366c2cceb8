"""Reward functions that fail in whole runs: responses without a reward, and the limit of their fraction."""

from collections.abc import Callable
from pathlib import Path

import pytest

from realhf.apps.commands.report import main as report
from tests.integration.conftest import Run, Started

pytestmark = [pytest.mark.dist, pytest.mark.slow]
TWO = "n_gpus_per_node=2"
ALWAYS = {  # what the function does for every response, and the failure
    "raise ValueError('no such tool')": "ValueError: no such tool\nTraceback (most recent call last):",
    "return None": "the reward is None, a NoneType; it must be a number",
    "return float('nan')": "the reward is nan, it must be finite",
    "return 1e300": "a reward is not a finite number",
}
Start = Callable[..., Started]


def reward(folder: Path, body: str) -> str:
    file = folder / "mine.py"
    file.write_text(f"def mine(prompt, answer, row):\n    {body}\n")
    return f"reward.fn={file}:mine"


@pytest.mark.parametrize("body", ALWAYS)
def test_a_run_whose_reward_function_always_fails_stops(
    realhf_start: Start, ppo_words: list[str], tmp_path: Path, body: str
) -> None:
    """The fraction is of all responses of the step: no rank has 14."""
    run = realhf_start("ppo-math", tmp_path, [*ppo_words, TWO, reward(tmp_path, body)]).finish()
    assert run.code == 1 and run.output.count("warning a response has no reward: rew_inf of step 1: ") == 1, run.output
    (error,) = (line for line in run.output.splitlines() if line.startswith("error: "))
    assert error.startswith(
        "error: rew_inf of step 1: 14 of 14 responses have no reward, more than a fraction of 0.05;"
    )
    assert error.endswith("correct the reward function, or increase reward.max_failures")
    assert ALWAYS[body] in run.output and ALWAYS[body] in (run.root / "first_failure.txt").read_text()
    assert not (run.root / "models").exists() and "done " not in run.output
    assert error.removeprefix("error: ") in (run.root / "error.txt").read_text()
    report([str(run.root), "--out", str(tmp_path / "page.html")])
    assert "responses have no reward, more than a fraction of 0.05" in (tmp_path / "page.html").read_text()


@pytest.fixture(scope="module")
def tolerant(
    realhf_all: Callable[..., dict[str, Run]], ppo_words: list[str], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Run]:
    folder = tmp_path_factory.mktemp("tolerant")
    never = [reward(folder, "raise RuntimeError(answer)"), "reward.max_failures=1"]
    variants = {
        "grpo": [TWO, "ppo.disable_value=True", "ppo.advantage=group", "ppo.group_size=3"],
        "critic": ["mode=inline", "ppo.generation_size=3", "dataset.eval_fraction=0.2"],
    }
    return realhf_all("ppo-math", folder, variants, [*ppo_words, *never, "exp_ctrl.total_train_steps=2"])


def test_a_step_without_any_reward_does_not_train(tolerant: dict[str, Run], tmp_path: Path) -> None:
    for run in tolerant.values():
        assert [line["reward/failed"] for line in run.metrics if line["step"]] == [1.0, 1.0]  # 0: an evaluation
        assert all(line.get("actor_train/grad_norm", 0.0) == 0.0 for line in run.metrics)
        assert run.output.count("warning a response has no reward") == run.output.count("Traceback") == 1
        assert not any("rewards" in row for row in run.generations(1))
        report([str(run.root), "--out", str(tmp_path / "page.html")])
        page = (tmp_path / "page.html").read_text()
        assert "First response without a reward" in page and "in mine\n    raise RuntimeError(answer)" in page
    assert tolerant["critic"].evaluations[-1]["metrics"]["eval/failed"] == 1.0


def test_failures_of_an_evaluation_stop_the_run(realhf_start: Start, ppo_words: list[str], tmp_path: Path) -> None:
    words = [reward(tmp_path, "return None"), "dataset.eval_fraction=0.3", "exp_ctrl.eval_at_start=True"]
    run = realhf_start("ppo-math", tmp_path, [*ppo_words, *words]).finish()
    assert run.code == 1 and "error: eval_rew of an evaluation: " in run.output, run.output
