"""The examples of several turns: their demonstrations are what an episode shows to the model."""

import json
import random
from pathlib import Path

import pytest

from examples.calculator_sums import demonstrations
from realhf.data.tokenizer import load_tokenizer
from realhf.environments import Reply, Turn
from realhf.environments.tool_calls import parse_pythonic
from realhf.environments.tool_env import as_environment
from realhf.environments.tools import CalculatorEnv
from tests.examples.test_examples import rows, run


def test_demonstrations_of_the_calculator_are_episodes() -> None:
    call, answer = demonstrations(random.Random(3), 1, 1.0, "<eos>")
    episode = as_environment(CalculatorEnv)(as_text=True)
    episode.reset({"prompt": call["prompt"], "answer": answer["answer"]}, 0)
    turn = episode.step(Reply(call["answer"], [], parse_pythonic(call["answer"])))
    assert answer["prompt"] == f"{call['prompt']}{call['answer']}<eos>{turn.text}"
    assert episode.step(Reply(answer["answer"], [])).reward == 1.0
    assert [len(list(demonstrations(random.Random(3), 20, share, ""))) for share in (0.0, 1.0)] == [20, 40]


def test_files_of_the_calculator(tmp_path: Path) -> None:
    done = run("calculator_sums.py", tmp_path, "--demonstrations", 30, "--train-rows", 10)
    assert done.returncode == 0, done.stderr
    tokenizer = load_tokenizer(tmp_path / "tokenizer")
    for row in rows(tmp_path / "sft.jsonl"):
        tokens = tokenizer(row["prompt"] + row["answer"])["input_ids"]
        assert tokenizer.decode(tokens) == row["prompt"] + row["answer"] and tokenizer.unk_token_id not in tokens
    train = rows(tmp_path / "train.jsonl")
    assert len(train) == 10
    assert all(sum(map(int, row["prompt"].removesuffix("=\n").split("+"))) == int(row["answer"]) for row in train)


def test_tic_tac_toe() -> None:
    pytest.importorskip("textarena")
    from examples.textarena_game import TicTacToe

    game = TicTacToe()
    assert game.reset({}, 1) == Turn(text=".........\n", info={"invalid_moves": 0})
    board = str(game.step(Reply("4", [])).text)
    assert (board[4], sorted(board)) == ("O", sorted(".......OX\n"))
    again = game.step(Reply("4", []))
    assert (again.text, again.done, again.info["invalid_moves"]) == (board, False, 1)
    lost = game.step(Reply("", []))
    assert (lost.done, lost.reward, lost.info["lost"], lost.info["won"]) == (True, -1.0, True, False)


def test_random_games_of_tic_tac_toe(tmp_path: Path) -> None:
    pytest.importorskip("textarena")
    done = run("textarena_game.py", tmp_path, "--games", 5)
    assert done.returncode == 0, done.stderr
    for row in rows(tmp_path / "sft.jsonl"):
        assert row["prompt"].splitlines()[-1][-9:][int(row["answer"])] == "."
    assert len(rows(tmp_path / "train.jsonl")) == 64
    results = json.loads(run("textarena_game.py", tmp_path, "--random-games", 50).stdout)
    assert 0.3 < results["won"] < 0.9 and results["reward"] == pytest.approx(results["won"] - results["lost"])
