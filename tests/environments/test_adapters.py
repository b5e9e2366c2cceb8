"""Adapters of other libraries' environments, with the real libraries, in the child processes of a pool."""

import importlib
import os
import re
from pathlib import Path
from typing import Any

import pytest

from realhf.base.errors import UserError
from realhf.environments import Reply, ToolCall, Turn
from realhf.environments.adapters.common import optional_library
from realhf.environments.adapters.gymnasium_env import observation_text
from realhf.environments.adapters.textarena_env import TextArenaEnv, available_moves
from tests.environments.episodes import Policy, play, rewards, script, shown
from tests.scaling import subset

FOLDER = Path(__file__).parent


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Child processes find the environments of this folder."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(FOLDER), os.environ.get("PYTHONPATH")))))


def test_a_missing_library_is_named() -> None:
    problem = r"env\.cls=\.\.\.:Env needs the package no-such-library: pip install 'realhf\[extra\]'"
    with pytest.raises(UserError, match=problem), optional_library("no_such_library", "extra", "Env"):
        importlib.import_module("no_such_library.part")
    with pytest.raises(ModuleNotFoundError), optional_library("a_library", "extra", "Env"):
        importlib.import_module("what_a_library_needs")


def test_gymnasium_frozen_lake() -> None:
    """Its map is fixed without slipping: right, right, down, down, down, right reaches the goal."""
    pytest.importorskip("gymnasium")
    options = {
        "id": "FrozenLake-v1",
        "make": {"is_slippery": False},
        "render_observation": "ansi",
        "actions": ["left", "down", "right", "up"],
        "instruction": "Reach G.",
    }
    path = ["I go right", "2", "nowhere", "1", "Down!", "first 0, no, down", "right"]
    first, second = play("GymnasiumEnv", options, script(*path), n_episodes=2)
    assert first == second and len(first) == 1 + len(path)
    assert shown(first[0]).startswith("Reach G.\n") and "FHFH" in shown(first[0])
    assert rewards(first) == [0, 0, 0, -0.1, 0, 0, 0, 1] and "left, down, right, up" in shown(first[3])
    assert first[-1].done and first[-1].info == {"invalid_actions": 1, "truncated": 0}


def test_gymnasium_blackjack_and_truncation() -> None:
    pytest.importorskip("gymnasium")
    first, second = play("GymnasiumEnv", {"id": "Blackjack-v1"}, script("stick: 0"), n_episodes=2)
    assert first == second and first[-1].done and first[-1].reward in (-1, 0, 1)
    assert re.fullmatch(r"\(\d+, \d+, [01]\)", shown(first[0]))
    others = [play("GymnasiumEnv", {"id": "Blackjack-v1"}, script("0"), seed=s)[0] for s in range(4, 7)]
    assert any(other[0] != first[0] for other in others)
    options = {"id": "Taxi-v4", "make": {"max_episode_steps": 3}, "invalid_reward": -2.0, "chat": False}
    (turns,) = play("GymnasiumEnv", options, script("0", "9" * 400, "7", "1", "0"))
    assert rewards(turns) == [0, -1, -2, -2, -1, -1] and turns[-1].info == {"invalid_actions": 2, "truncated": 1}
    assert turns[2].text == "This is not a valid action. Write an integer from 0 to 5."


def test_gymnasium_text_spaces() -> None:
    pytest.importorskip("gymnasium")
    options = {"id": "text_world:Words-v0", "render_observation": f"{FOLDER / 'text_world.py'}:upper"}
    (turns,) = play("GymnasiumEnv", options, script(" cab\n", "not these letters", "abc"), {"reset": {"word": "cab"}})
    assert [shown(turn) for turn in turns[:2]] == ["<CAB>", "<CAB>"] and rewards(turns) == [0, 1, -0.1, 0]
    (turns,) = play("GymnasiumEnv", {"id": "text_world:Pairs-v0"}, script("2", "2 and 4", "2 and 3"))
    assert rewards(turns) == [0, -0.1, -0.1, 5]
    with pytest.raises(RuntimeError, match="env.options.id='text_world:Floats-v0' has actions Box"):
        play("GymnasiumEnv", {"id": "text_world:Floats-v0"}, script(""))
    with pytest.raises(RuntimeError, match="env.options.id='NoSuchWorld-v0'"):
        play("GymnasiumEnv", {"id": "NoSuchWorld-v0"}, script(""))


def test_observations_as_text() -> None:
    assert observation_text({"a": (1, "x"), "b": [2.5]}) == "a: (1, x)\nb: (2.5)"


REASONING_TASKS = ["basic_arithmetic", "chain_sum", "leg_counting", "gcd", "spell_backward", "number_sorting",
                   "knights_knaves", "countdown", "sudoku", "letter_counting"]  # fmt: skip


@pytest.mark.parametrize("task", subset(REASONING_TASKS, 4))
def test_reasoning_gym(task: str) -> None:
    """The reward of the library's own answer is 1, and rows and seeds pick the library's entries."""
    gym = pytest.importorskip("reasoning_gym")
    data = gym.create_dataset(task, seed=0, size=8)
    entries, options = [data[number] for number in range(8)], {"task": task, "instruction": ""}
    right = script(f"I think: <answer>0</answer>, no <answer>{entries[5]['answer']}</answer>")
    first, second = play("ReasoningGymEnv", options, right, {"index": 5}, n_episodes=2)
    assert first == second and shown(first[0]) == entries[5]["question"] and first[1].reward == 1 and first[1].done
    (turns,) = play("ReasoningGymEnv", options, script(entries[7]["answer"]), seed=7)
    assert shown(turns[0]) == entries[7]["question"] and turns[1].info["no_answer"] == 1
    assert turns[1].reward == data.score_answer(None, entries[7]) < 0.5


def test_reasoning_gym_options() -> None:
    gym = pytest.importorskip("reasoning_gym")
    config = {"min_terms": 2, "max_terms": 2, "seed": 40}
    answer = gym.create_dataset("chain_sum", size=1, **{**config, "seed": 42})[0]["answer"]
    options = {"task": "chain_sum", "config": config, "answer_tag": ""}
    (turns,) = play("ReasoningGymEnv", options, script(f" {answer}\n"), seed=2)
    assert turns[1].reward == 1
    with pytest.raises(RuntimeError, match="did you mean chain_sum"):
        play("ReasoningGymEnv", {"task": "chainsum"}, script(""))
    with pytest.raises(RuntimeError, match="env.options.config="):
        play("ReasoningGymEnv", {"task": "chain_sum", "config": {"terms": 1}}, script(""))
    with pytest.raises(RuntimeError, match="'index' of a row is 'x'"):
        play("ReasoningGymEnv", {"task": "chain_sum"}, script(""), {"index": "x"})


def bisect(turns: list[Turn]) -> Policy:
    """Guess a number from 1 to 20 from the hints; the turns of the episode are appended to ``turns``."""

    def guess(turn: Turn, number: int) -> str:
        low, high = 1, 20
        turns.append(turn)
        for one in turns[1:]:
            middle = (low + high) // 2
            low, high = (middle + 1, high) if "is higher" in shown(one).splitlines()[-1] else (low, middle - 1)
        return f"My guess is [{(low + high) // 2}]."

    return guess


def test_textarena_alone() -> None:
    pytest.importorskip("textarena")
    games = [play("TextArenaEnv", {"id": "GuessTheNumber-v0"}, bisect([]), seed=seed)[0] for seed in (3, 3, 4, 5, 6)]
    assert games[0] == games[1] and any(len(game) != len(games[0]) for game in games[2:])
    assert all(game[-1].done and game[-1].reward == 1 and not any(rewards(game[:-1])) for game in games)
    (turns,) = play("TextArenaEnv", {"id": "GuessTheNumber-v0"}, script("no number", "[77]"))
    assert turns[1].info == {"invalid_moves": 1} and "invalid move" in shown(turns[1])
    assert turns[2].done and turns[2].reward == 0 and turns[2].info == {"invalid_moves": 2}


def test_textarena_games_do_not_share_their_randomness() -> None:
    """Games draw from the module ``random``; turns of other games in the process change nothing."""
    pytest.importorskip("textarena")
    moves = ("[up]", "[right]", "[down]", "[left]")
    options = {"id": "2048-v0-super-easy"}
    policy = lambda _, number: moves[number % 4]
    (alone,) = play("TextArenaEnv", options, policy, max_turns=12)
    assert play("TextArenaEnv", options, policy, n_episodes=3, max_turns=12) == [alone] * 3
    assert len({shown(turn) for turn in alone}) > 4 and all(turn.info == {"invalid_moves": 0} for turn in alone)
    assert play("TextArenaEnv", options, policy, seed=4, max_turns=12) != [alone]


def test_textarena_against_an_opponent() -> None:
    """The first valid move wins or loses against others; an invalid one twice loses."""
    pytest.importorskip("textarena")
    options = {"id": "TicTacToe-v0", "players": 2}
    first = lambda turn, _: available_moves(shown(turn))[0]
    games = [play("TextArenaEnv", {**options, "player": p}, first, seed=s)[0] for p in (0, 1) for s in (3, 3, 4, 5)]
    assert games[0] == games[1] and games[4] == games[5] and any(game != games[0] for game in games[2:4])
    assert all(game[-1].done and game[-1].reward in (-1, 0, 1) for game in games)
    (lost,) = play("TextArenaEnv", options, script("[4]", "nothing", "[99]"))
    assert lost[-1].reward == -1 and lost[-1].info == {"invalid_moves": 2} and len(lost) == 4
    scripted = {"id": "ConnectFour-v0", "players": 2, "opponent": "[col 0]"}
    (won,) = play("TextArenaEnv", scripted, script("[col 3]"))
    assert won[-1].reward == 1 and len(won) == 5
    with pytest.raises(RuntimeError, match="lists no moves"):
        play("TextArenaEnv", {**scripted, "opponent": "random"}, script("[col 3]"))


def test_textarena_options() -> None:
    pytest.importorskip("textarena")
    with pytest.raises(UserError, match="env.options.player=2"):
        TextArenaEnv("TicTacToe-v0", players=2, player=2)
    with pytest.raises(RuntimeError, match="did you mean TicTacToe"):
        play("TextArenaEnv", {"id": "TicTacTo-v0"}, script(""))
    with pytest.raises(RuntimeError, match="cannot start the game"):
        play("TextArenaEnv", {"id": "TicTacToe-v0"}, script(""))
    assert available_moves("Valid moves: '[a]', [b c]\nYou: [x]") == ["[a]", "[b c]"]


def verifiers_options(name: str, **options: object) -> dict[str, Any]:
    pytest.importorskip("verifiers.v1", reason="verifiers is not installed")
    return {"id": name, **options}


def last_content(turn: Turn) -> str:
    return turn.messages[-1]["content"] if turn.messages else ""


@pytest.mark.slow
def test_verifiers_single_turn() -> None:
    options = verifiers_options("vf_sums")
    episodes = play("VerifiersEnv", options, script("13"), {"index": 3}, n_episodes=3)
    assert episodes[0] == episodes[1] == episodes[2] and shown(episodes[0][0]) == "Be brief.\nWhat is 3 + 10?"
    assert rewards(episodes[0]) == [0, 1] and episodes[0][-1].info == {"turns": 1}
    (turns,) = play("VerifiersEnv", options, script("I do not know"), seed=9)
    assert shown(turns[0]).endswith("What is 4 + 10?") and rewards(turns) == [0, 0]
    with pytest.raises(RuntimeError, match="env.options.id='no_such_taskset'"):
        play("VerifiersEnv", verifiers_options("no_such_taskset"), script(""))


@pytest.mark.slow
def test_verifiers_episodes_share_servers(tmp_path: Path) -> None:
    """One client serves all episodes: each gets its own replies. Servers run from the first episode to the last."""
    rows = [{"index": i % 5} for i in range(20)]

    def answer(turn: Turn, _: int) -> str:
        return str(10 + int(shown(turn).split()[-3]))

    episodes = play("VerifiersEnv", verifiers_options("vf_sums"), answer, rows=rows)
    assert [rewards(turns) for turns in episodes] == [[0, 1]] * 20
    log = tmp_path / "log"
    options = verifiers_options("vf_guess", n_tasks=20, config={"log": str(log)})
    play("VerifiersEnv", options, script("5", "1"), n_episodes=4)
    assert log.read_text().split() == ["start", "stop"]
    options = verifiers_options("vf_guess", n_tasks=20, config={"is_broken": True})
    with pytest.raises(RuntimeError, match="the servers are broken"):
        play("VerifiersEnv", options, script("5"), n_episodes=4)


@pytest.mark.slow
def test_verifiers_tools() -> None:
    def call(name: str, error: str = "", **arguments: object) -> Reply:
        return Reply("", [1], [ToolCall(name, arguments, error)])

    name = "lookup_toolset_lookup"
    replies = script(call(name, key="b"), call("other"), call(name, "not JSON"), call(name, key="x"), "23")
    (turns,) = play("VerifiersEnv", verifiers_options("vf_lookup"), replies, {"index": 1})
    assert turns[0].tools[0]["function"]["name"] == name and rewards(turns) == [0, 0, 0, 0, 0, 2]
    assert [one.messages[-1]["role"] for one in turns[1:5]] == ["tool"] * 4 and last_content(turns[1]) == "23"
    assert "no such tool" in last_content(turns[2]) and "not valid JSON" in last_content(turns[3])
    assert "rror" in last_content(turns[4]) and len(turns[4].messages) == 9
    assert turns[-1].info == {"tool_calls": 4}


@pytest.mark.slow
def test_verifiers_multi_turn() -> None:
    options = verifiers_options("vf_guess", n_tasks=20)
    episodes = play("VerifiersEnv", options, script("5", "1"), n_episodes=4)
    assert all(episode == episodes[0] for episode in episodes) and rewards(episodes[0]) == [0, 0, 1]
    assert [last_content(turn) for turn in episodes[0]] == ["Guess my number.", "wrong", ""]
    (turns,) = play("VerifiersEnv", options, script("0"))
    assert rewards(turns) == [0] * 5
    with pytest.raises(RuntimeError, match="env.options.n_tasks=0"):
        play("VerifiersEnv", verifiers_options("vf_guess"), script(""))
