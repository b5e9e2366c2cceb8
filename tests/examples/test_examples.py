"""The example programs."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from realhf.api.config import DatasetConfig
from realhf.api.experiment import Task
from realhf.data.source import RowSource
from realhf.data.tokenizer import load_tokenizer
from realhf.rewards.math.equality import judge_math
from realhf.rewards.registry import load_reward
from tests.conftest import TIMEOUT_S

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(program: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(EXAMPLES / program), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )


def rows(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.fixture(scope="module")
def arithmetic(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("arithmetic")
    done = run("arithmetic.py", out, "--sft-rows", 50, "--train-rows", 40, "--valid-rows", 30, "--digits", 3)
    assert done.returncode == 0, done.stderr
    return out


def test_worked_sums_are_right_and_files_are_disjoint(arithmetic: Path) -> None:
    files = [rows(arithmetic / f"{name}.jsonl") for name in ("sft", "train", "valid")]
    assert [len(file) for file in files] == [50, 40, 30]
    assert len({row["prompt"] for file in files for row in file}) == 120
    for row in files[0]:
        a, b = row["prompt"].removesuffix("=\n").split("+")
        steps = [step.split("=") for step in row["answer"].splitlines()[:-1]]
        assert all(sum(map(int, left.split("+"))) == int(right) for left, right in steps)
        assert judge_math("", row["answer"], {"solutions": [f"#### {int(a) + int(b)}"]}) == 1.0


def test_the_tokenizer_is_lossless_and_fits_the_model(arithmetic: Path) -> None:
    tokenizer = load_tokenizer(arithmetic / "tokenizer")
    for row in rows(arithmetic / "sft.jsonl"):
        text = row["prompt"] + row["answer"]
        tokens = tokenizer(text)["input_ids"]
        assert tokenizer.decode(tokens) == text and len(tokens) == len(text)
    model = json.loads((arithmetic / "model/config.json").read_text())
    assert model["vocab_size"] == len(tokenizer)
    assert model["eos_token_id"] == tokenizer.eos_token_id


def test_files_are_valid_for_their_tasks(arithmetic: Path) -> None:
    tokenizer = load_tokenizer(arithmetic / "tokenizer")
    tasks = {"sft": Task.sft, "train": Task.math, "valid": Task.math, "preferences": Task.pairs, "steps": Task.process}
    for name, task in {**tasks, "outcomes": Task.outcome}.items():
        assert len(RowSource(DatasetConfig(path=str(arithmetic / f"{name}.jsonl")), task, tokenizer, 1)) >= 30


@pytest.mark.slow
def test_files_depend_on_the_seed_only(arithmetic: Path, tmp_path: Path) -> None:
    options = ["--sft-rows", 50, "--train-rows", 40, "--valid-rows", 30, "--digits", 3]
    for seed, same in [(1, True), (2, False)]:
        run("arithmetic.py", tmp_path / str(seed), *options, "--seed", seed)
        texts = [(out / "sft.jsonl").read_text() for out in (tmp_path / str(seed), arithmetic)]
        assert (texts[0] == texts[1]) is same


def test_more_rows_than_sums(tmp_path: Path) -> None:
    done = run("arithmetic.py", tmp_path / "out", "--digits", 1)
    assert done.returncode == 2 and "there are 81 sums" in done.stderr


def test_make_tokenizer(tmp_path: Path) -> None:
    file = tmp_path / "d.jsonl"
    file.write_text(json.dumps({"a": "low lower lowest", "b": ["slow", {"c": "slower"}], "n": 3}) + "\n\n")
    assert run("make_tokenizer.py", file, tmp_path / "out", "--vocab", 264).returncode == 0
    tokenizer = load_tokenizer(tmp_path / "out")
    text = " lower,\n\n\u00e9 slow ."
    tokens = tokenizer(text)["input_ids"]
    assert tokenizer.decode(tokens) == text
    assert len(tokens) < len(text.encode())
    assert json.loads((tmp_path / "out/config.json").read_text())["vocab_size"] == len(tokenizer) == 264


def test_custom_reward_prefers_short_right_responses() -> None:
    reward = load_reward(f"{EXAMPLES / 'custom_reward.py'}:reward", 1.0)
    row = {"solutions": ["#### 85"]}
    scores = [reward("", answer, row) for answer in ("#### 85", "20+65=85\n#### 85", "#### 86", "")]
    assert scores == sorted(scores, reverse=True)
    assert scores[0] > scores[1] > scores[2] == scores[3] == 0.0


def test_gsm8k_script_without_data() -> None:
    done = subprocess.run(
        ["sh", str(EXAMPLES / "gsm8k.sh")], env={"GSM8K": "none.jsonl", "PATH": "/usr/bin:/bin"}, capture_output=True
    )
    assert done.returncode == 1 and b"no file none.jsonl" in done.stderr


def is_right(prompt: str, answer: str) -> list[bool]:
    """Return whether each digit sum of a worked sum is right, and whether the result is."""
    numbers = prompt.removesuffix("=\n").split("+")
    *lines, result = answer.splitlines()
    carry, results = 0, []
    for x, y, line in zip(*(number[::-1] for number in numbers), lines, strict=True):
        total = int(x) + int(y) + carry
        results.append(line == f"{x}+{y}+{carry}={total}")
        carry = total // 10
    return [*results, result == f"#### {sum(map(int, numbers))}"]


def test_labels_of_solutions(arithmetic: Path) -> None:
    prompts = [row["prompt"] for row in rows(arithmetic / "train.jsonl")]
    pairs, outcomes, steps = (rows(arithmetic / f"{name}.jsonl") for name in ("preferences", "outcomes", "steps"))
    assert all([row["prompt"] for row in labelled] == prompts for labelled in (pairs, outcomes, steps))
    for pair, outcome, row in zip(pairs, outcomes, steps, strict=True):
        assert all(is_right(pair["prompt"], pair["chosen"])) and not all(is_right(pair["prompt"], pair["rejected"]))
        assert outcome["answer"] == pair["chosen" if outcome["label"] else "rejected"] == "\n".join(row["steps"])
        first_mistake = ([*is_right(row["prompt"], outcome["answer"])[:-1], False]).index(False)
        assert row["labels"] == [float(i < first_mistake) for i in range(3)] and len(row["steps"]) == 3
    assert 5 < sum(row["label"] for row in outcomes) < 35


def test_build_pairs(tmp_path: Path) -> None:
    """One prompt in two steps, another with right responses only, a third in messages."""
    chat = [{"role": "user", "content": "?"}]
    answers = {
        "step_2": [("q", "good", 1.0, None), ("all", "x", 1.0, None), ("q", "bad", -1.0, None), ("q", "", -1.0, None)],
        "step_10": [
            ("q", "worse", -1.0, None),
            ("u:?", "yes", 0.5, {"prompt": chat}),
            ("u:?", "no", 0.0, {"prompt": chat}),
        ],
    }
    (tmp_path / "generations").mkdir()
    for name, some in answers.items():
        lines = [json.dumps(dict(zip(("prompt", "response", "rewards", "fields"), row, strict=True))) for row in some]
        (tmp_path / "generations" / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    done = run("build_pairs.py", tmp_path / "generations", tmp_path / "pairs.jsonl")
    assert done.returncode == 0 and done.stdout.endswith("pairs.jsonl: 3 pairs for 2 of 3 prompts\n"), done.stderr
    assert rows(tmp_path / "pairs.jsonl") == [
        {"prompt": "q", "pos_answers": ["good", "good"], "neg_answers": ["bad", "worse"]},
        {"prompt": chat, "pos_answers": ["yes"], "neg_answers": ["no"]},
    ]
    run("build_pairs.py", tmp_path / "generations", tmp_path / "one.jsonl", "--max-pairs", 1, "--threshold", 0.7)
    assert [len(row["pos_answers"]) for row in rows(tmp_path / "one.jsonl")] == [1]
