"""Contradictions of sources and curriculum are named."""

from typing import Any

import pytest

from realhf.apps.commands.quickstart import read_words
from realhf.apps.prepare.curriculum import curriculum_problems, empty_sources
from realhf.base.errors import UserError

SECTION = "dataset.curriculum"
BAND = f"{SECTION}.max_pass_rate=0.9"


def problems(name: str, *words: str) -> list[str]:
    config: Any = read_words(name, list(words))[0]
    try:
        return config.problems() + curriculum_problems(config, config.graph())
    except UserError as error:
        return error.problems


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["dataset.path=a", "dataset.paths=[b]"], "dataset.path and dataset.paths are both set"),
        (["dataset.paths=[a,b]", "dataset.weights=[1]"], "dataset.weights has 1 numbers, dataset.paths has 2 paths"),
        (["dataset.weights=[1,2]"], "dataset.weights has 2 numbers, dataset.paths has 0 paths"),
        (["dataset.paths=[a,b]", "dataset.weights=[0,0]"], "dataset.weights=[0.0, 0.0]: one weight must be positive"),
        (["dataset.paths=[a,b]", f"{SECTION}.ramp_steps=5", f"{SECTION}.final_weights=[1,2,3]"],
         f"{SECTION}.final_weights has 3 numbers, dataset.paths has 2 paths"),
        ([f"{SECTION}.min_pass_rate=0.8", f"{SECTION}.max_pass_rate=0.2"],
         f"{SECTION}.min_pass_rate=0.8 is larger than {SECTION}.max_pass_rate=0.2"),
        ([f"{SECTION}.final_min_pass_rate=0.8", BAND.replace("0.9", "0.7"), f"{SECTION}.ramp_steps=5"],
         "the final minimum 0.8 is larger than the final maximum 0.7"),
        ([f"{SECTION}.final_max_pass_rate=0.8"], f"{SECTION}.final_max_pass_rate needs {SECTION}.ramp_steps"),
        ([f"{SECTION}.ramp_steps=8"], f"{SECTION}.ramp_steps=8: no final value is set"),
        (["dataset_filter_threshold=0.5"], "dataset_filter_threshold=0.5 needs dataset_max_filter_percentage"),
        ([BAND, "env.cls=realhf.environments.tool_env:ToolEnv", "env.partial_tokens=100"],
         "not with env.partial_tokens"),
    ],
)  # fmt: skip
def test_contradictions(words: list[str], expected: str) -> None:
    assert any(expected in problem for problem in problems("grpo", *words))


@pytest.mark.parametrize(
    ("name", "words", "expected"),
    [
        ("sft", [BAND], "need rewards, which this experiment does not have"),
        ("gen", [BAND], "need rewards, which this experiment does not have"),
        ("dpo", [BAND], "need rewards, which this experiment does not have"),
        ("sft", [f"{SECTION}.sort_by=level"], "rows of sft data have no further columns"),
        ("rw", [f"{SECTION}.sort_by=level"], "rows of pairs data have no further columns"),
        ("score", ["dataset.paths=[a]"], "scoring reads every row of dataset.path once"),
    ],
)
def test_experiments_without_what_is_needed(name: str, words: list[str], expected: str) -> None:
    assert any(expected in problem for problem in problems(name, *words))


@pytest.mark.parametrize("name", ["restem", "bon"])
def test_multi_stage_experiments_read_every_row_once(name: str) -> None:
    config: Any = read_words(name, [BAND])[0]
    assert any("reads every row of dataset.path once" in problem for problem in config.problems())


@pytest.mark.parametrize("name", ["grpo", "ppo", "ppo-math", "ppo-code", "remax", "vineppo"])
def test_all_policy_gradient_experiments_have_a_curriculum(name: str) -> None:
    words = [BAND, f"{SECTION}.sort_by=level", "dataset.paths=[a,b]", "dataset_max_filter_percentage=0.1"]
    assert [line for line in problems(name, *words) if "dataset" in line] == []


def test_ranges() -> None:
    for word in ("min_pass_rate=1.5", "max_pass_rate=nan", "recheck_epochs=-1", "ramp_steps=-2", "pass_reward=inf"):
        with pytest.raises(UserError, match="must be"):
            read_words("grpo", [f"{SECTION}.{word}"])
    for word in ("dataset.weights=[1,-1]", "dataset_max_filter_percentage=1.1", "dataset_filter_threshold=nan"):
        with pytest.raises(UserError, match="must be"):
            read_words("grpo", [word])


def test_a_source_without_training_rows_is_named() -> None:
    config: Any = read_words("sft", ["dataset.paths=[a,b]", "dataset.eval_fraction=0.5"])[0]
    assert empty_sources(config, (3, 1)) == []
    assert empty_sources(config, (3, 0)) == ["dataset.eval_fraction=0.5 holds out all rows of b; set dataset.eval_path"]
