"""Problems of the reward options, and the dataset rows that rewards need."""

from pathlib import Path

import pytest

from realhf.api.config import RewardConfig
from realhf.api.experiment import Task
from realhf.experiments.options.checks import reward_problems
from realhf.experiments.options.models import reward_task


@pytest.mark.parametrize(
    ("options", "task"),
    [
        ({}, Task.math),
        ({"fn": "code"}, Task.code),
        ({"fn": "http://host/judge?fn=math"}, Task.math),
        ({"fn": "http://host/judge"}, Task.prompt),
        ({"fns": ["format:x", "math"]}, Task.math),
        ({"fns": ["mine.py:f", "code_unordered"]}, Task.code),
        ({"fn": "mine.py:f"}, Task.prompt),
    ],
)
def test_task_of_the_dataset_rows(options: dict, task: Task) -> None:
    assert reward_task(RewardConfig(**options)) is task


@pytest.mark.parametrize(
    ("options", "start"),
    [
        ({"fn": "f.py:g", "fns": ["math"]}, "reward.fn=f.py:g and reward.fns=['math']: set only one"),
        ({"fns": ["math", "math"]}, "reward.fns: the names math, math must differ"),
        (
            {"fns": ["math"], "weights": [1.0, 2.0]},
            "reward.weights has 2 numbers, but there are 1 rewards",
        ),
        ({"fns": ["math", "maths"]}, "reward.fn='maths' must be one of math, math_strict, code, "),
        ({"fn": "format:("}, "reward.fn='format:(': invalid regular expression"),
        ({"format_reward": "("}, "reward.fn='format:(': invalid regular expression"),
        (
            {"fn": "format:x", "format_reward": "x"},
            "reward.format_reward needs one of the verifiers math, math_strict, code, ",
        ),
        ({"fn": "http://host:0/"}, "reward.fn='http://host:0/' is not of the form"),
        ({"token_env": "X"}, "reward.token_env is for services"),
        ({"fn": "http://host/", "token_env": "X"}, "reward.token_env=X: this environment variable is not set or empty"),
    ],
)
def test_invalid_options(options: dict, start: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("X", raising=False)
    (problem,) = reward_problems(RewardConfig(**options), 1)
    assert problem.startswith(start)


def test_valid_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("X", "secret")
    (tmp_path / "r.py").write_text("async def reward(prompt, answer, row): return 1.0\n")
    fns = ["math", "http://host/judge", f"{tmp_path}/r.py:reward", "format:.*"]
    assert (
        reward_problems(RewardConfig(fns=fns, weights=[1.0, -0.5, 0.0, 2.0], token_env="X", format_reward=".*"), 1)
        == []
    )
