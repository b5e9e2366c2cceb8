"""The example programs do what they say."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from realhf.api.config import DatasetConfig
from realhf.api.experiment import Task
from realhf.data.source import RowSource
from realhf.data.tokenizer import load_tokenizer
from realhf.rewards.judge import load_reward
from realhf.rewards.math import judge_math

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(program: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(EXAMPLES / program), *map(str, arguments)], capture_output=True, text=True, timeout=60
    )


def rows(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.fixture(scope="module")
def arithmetic(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("arithmetic")
    done = run("arithmetic.py", out, "--sft-rows", 50, "--train-rows", 40, "--valid-rows", 30, "--digits", 3)
    assert done.returncode == 0, done.stderr
    return out


def test_worked_sums_are_right_and_no_sum_is_in_two_files(arithmetic: Path) -> None:
    files = [rows(arithmetic / f"{name}.jsonl") for name in ("sft", "train", "valid")]
    assert [len(file) for file in files] == [50, 40, 30]
    assert len({row["prompt"] for file in files for row in file}) == 120
    for row in files[0]:
        a, b = row["prompt"].removesuffix("=\n").split("+")
        steps = [step.split("=") for step in row["answer"].splitlines()[:-1]]
        assert all(sum(map(int, left.split("+"))) == int(right) for left, right in steps)
        assert judge_math("", row["answer"], {"solutions": [f"#### {int(a) + int(b)}"]}) == 1.0


def test_the_tokenizer_gives_every_text_back_and_fits_the_model(arithmetic: Path) -> None:
    tokenizer = load_tokenizer(arithmetic / "tokenizer")
    for row in rows(arithmetic / "sft.jsonl"):
        text = row["prompt"] + row["answer"]
        tokens = tokenizer(text)["input_ids"]
        assert tokenizer.decode(tokens) == text and len(tokens) == len(text)
    model = json.loads((arithmetic / "model/config.json").read_text())
    assert model["vocab_size"] == len(tokenizer)
    assert model["eos_token_id"] == tokenizer.eos_token_id


def test_the_files_are_what_the_tasks_read(arithmetic: Path) -> None:
    tokenizer = load_tokenizer(arithmetic / "tokenizer")
    for name, task in [("sft", Task.sft), ("train", Task.math), ("valid", Task.math)]:
        assert len(RowSource(DatasetConfig(path=str(arithmetic / f"{name}.jsonl")), task, tokenizer, 1)) >= 30


def test_the_same_seed_makes_the_same_files(arithmetic: Path, tmp_path: Path) -> None:
    options = ["--sft-rows", 50, "--train-rows", 40, "--valid-rows", 30, "--digits", 3]
    for seed, same in [(1, True), (2, False)]:
        run("arithmetic.py", tmp_path / str(seed), *options, "--seed", seed)
        texts = [(out / "sft.jsonl").read_text() for out in (tmp_path / str(seed), arithmetic)]
        assert (texts[0] == texts[1]) is same


def test_more_rows_than_sums_are_refused(tmp_path: Path) -> None:
    done = run("arithmetic.py", tmp_path / "out", "--digits", 1)
    assert done.returncode == 2 and "there are 81 sums" in done.stderr


def test_a_tokenizer_is_trained_on_any_jsonl(tmp_path: Path) -> None:
    file = tmp_path / "d.jsonl"
    file.write_text(json.dumps({"a": "low lower lowest", "b": ["slow", {"c": "slower"}], "n": 3}) + "\n\n")
    assert run("make_tokenizer.py", file, tmp_path / "out", "--vocab", 264).returncode == 0
    tokenizer = load_tokenizer(tmp_path / "out")
    text = " lower,\n\n\u00e9 slow ."
    tokens = tokenizer(text)["input_ids"]
    assert tokenizer.decode(tokens) == text
    assert len(tokens) < len(text.encode())
    assert json.loads((tmp_path / "out/config.json").read_text())["vocab_size"] == len(tokenizer) == 264


def test_the_reward_of_ones_own_prefers_short_right_answers() -> None:
    reward = load_reward(f"{EXAMPLES / 'custom_reward.py'}:reward")
    row = {"solutions": ["#### 85"]}
    scores = [reward("", answer, row) for answer in ("#### 85", "20+65=85\n#### 85", "#### 86", "")]
    assert scores == sorted(scores, reverse=True)
    assert scores[0] > scores[1] > scores[2] == scores[3] == 0.0


def test_the_gsm8k_script_says_when_the_data_is_missing() -> None:
    done = subprocess.run(
        ["sh", str(EXAMPLES / "gsm8k.sh")], env={"GSM8K": "none.jsonl", "PATH": "/usr/bin:/bin"}, capture_output=True
    )
    assert done.returncode == 1 and b"no file none.jsonl" in done.stderr
