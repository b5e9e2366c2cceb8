"""The experiment with code."""

from pathlib import Path

from realhf.api.experiment import Task
from realhf.experiments.ppo_math import PPOCodeExperiment, PPOMathExperiment


def test_the_default_reward_is_code(tmp_path: Path) -> None:
    experiment = PPOCodeExperiment()
    assert experiment.task is Task.code and experiment.problems() == []
    assert experiment.graph().dataset_keys == ("prompts", "row")
    assert experiment.graph()["rew_inf"].interface.config["reward"]["fn"] == "code"
    (tmp_path / "r.py").write_text("def reward(prompt, answer, row):\n    return 1.0\n")
    tasks = {"code_unordered": Task.code, "math": Task.math, f"{tmp_path}/r.py:reward": Task.prompt}
    for experiment.reward.fn, task in tasks.items():
        assert experiment.task is task and experiment.problems() == []
    experiment.reward.fn = "cod"
    assert experiment.problems() != []


def test_defaults_are_not_shared() -> None:
    PPOCodeExperiment().reward.timeout = 1.0
    assert PPOCodeExperiment().reward.timeout == PPOMathExperiment().reward.timeout
    assert PPOMathExperiment().reward.fn == "math"
