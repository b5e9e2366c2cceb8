"""Agents and their endpoint: requests of every kind, programs that fail, and what is left of them."""

import json
import os
import resource
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from realhf.environments import Reply, ToolCall, Turn
from realhf.environments.env_process import EnvOptions
from realhf.environments.pool import EnvFailure, EnvPool
from tests.conftest import TIMEOUT_S

FUNCTIONS = Path(__file__).with_name("agent_functions.py")
Play = Callable[..., tuple[list[Turn], EnvFailure | None]]


@pytest.fixture
def play() -> Iterator[Play]:
    """Play one episode, with replies ``reply 0``, ``reply 1``; return its turns and its failure."""
    pools: list[EnvPool] = []

    def run(cls: str, options: dict[str, Any] | None = None, row: dict[str, Any] | None = None, timeout: float = 60.0,
            limit: int = 30, wait: float = 0.0) -> tuple[list[Turn], EnvFailure | None]:  # fmt: skip
        pools.append(EnvPool(EnvOptions(cls, options or {}, 1, timeout)))
        pools[-1].reset(0, row or {}, 5)
        turns: list[Turn] = []
        end = time.monotonic() + TIMEOUT_S
        while time.monotonic() < end:
            for answer in pools[-1].poll(1.0):
                if isinstance(answer.result, EnvFailure):
                    return turns, answer.result
                turns.append(answer.result)
                if answer.result.done:
                    pools[-1].end(0)
                    pools[-1].poll(0.1)
                    return turns, None
                time.sleep(wait)
                wait = 0.0
                if len(turns) > limit:
                    pools[-1].truncate(0)
                    continue
                calls = [ToolCall("add", {"a": 1})] if answer.result.tools else []
                pools[-1].step(0, Reply(f"reply {len(turns) - 1}", [4, 5], calls, "stop", [-1.0, -2.0], 7))
        raise TimeoutError(f"{cls} did not end")

    yield run
    for pool in pools:
        pool.close()


@pytest.mark.parametrize("name", ["invalid", "everything", "crowded"])
def test_requests(name: str, play: Play) -> None:
    turns, failure = play(f"{FUNCTIONS}:{name}")
    assert failure is None, failure
    assert turns[-1].reward == 1.0


def test_turns_are_the_requests(play: Play) -> None:
    turns, _ = play(f"{FUNCTIONS}:everything")
    first, second, third, fourth, last = turns
    assert first.whole and list(first.messages) == [{"role": "user", "content": "hello"}] and len(first.tools) == 1
    assert second.messages[1] == {"role": "assistant", "content": "reply 0"}  # its calls are in its text
    assert second.messages[2]["role"] == "tool" and second.messages[2]["content"] == "2"
    assert third.tokens == [1, 2, 3] and third.max_tokens == 9 and fourth.tokens == [1, 2, 3, 4, 5]
    assert last.done and not last.whole


def test_a_client_that_leaves(play: Play) -> None:
    turns, failure = play(f"{FUNCTIONS}:impatient", wait=1.5)
    assert failure is None and turns[-1].reward == 1.0 and len(turns) == 3


def test_an_agent_at_its_limit(play: Play) -> None:
    """It may give a reward; one that does not expect the error has none."""
    turns, failure = play(f"{FUNCTIONS}:endless", limit=3)
    assert failure is None and turns[-1].reward == 0.25 and turns[-1].info == {"replies": 3}
    turns, failure = play(f"{FUNCTIONS}:careless", limit=3)
    assert failure is None and turns[-1].reward == 0 and turns[-1].done


@pytest.mark.parametrize(
    "name, kind, problem",
    [
        ("failing", "error", "LookupError: the agent is lost"),
        ("nothing", "error", "it must return a reward"),
        ("nan", "error", "must be finite"),
        ("stuck", "timeout", "no answer after 2 s"),
        ("blocking", "timeout", "no answer after 2 s"),
        ("escaping", "error", "SystemExit"),
    ],
)
def test_functions_that_fail(name: str, kind: str, problem: str, play: Play) -> None:
    _, failure = play(f"{FUNCTIONS}:{name}", timeout=2.0 if kind == "timeout" else 60.0)
    assert failure is not None and failure.kind == kind and problem in failure.detail, failure


def test_options_of_a_function(play: Play) -> None:
    turns, _ = play(f"{FUNCTIONS}:silent", {"reward": 0.75})
    assert [turn.reward for turn in turns] == [0.75]
    _, failure = play(f"{FUNCTIONS}:silent", {"rewards": 0.75})
    assert failure is not None and "unexpected keyword argument 'rewards'" in failure.detail


PROGRAMS = {
    "exit": ("import sys; print('x' * 10**6, file=sys.stderr); sys.exit('the board is lost')", "the board is lost"),
    "signal": ("import os; os.kill(os.getpid(), 9)", "Killed"),
    "no reward": ("print('')", "the last line of the agent's output is nothing"),
    "text": ("print('one')", "the last line of the agent's output is 'one'"),
    "nan": ("print('NaN')", "must be finite"),
    "list": ("print('[1]')", "it must return a reward"),
    "binary": ("import sys; sys.stdout.buffer.write(b'\\xff\\xfe')", "the last line of the agent's output"),
    "closed": ("import os; os.close(1); os.close(0)", "the last line of the agent's output is nothing"),
}


def program(code: str) -> dict[str, Any]:
    return {"command": [sys.executable, "-c", code]}


AGENT = "realhf.environments.agents:AgentProgram"


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_that_fail(name: str, play: Play) -> None:
    code, problem = PROGRAMS[name]
    _, failure = play(AGENT, program(code))
    assert failure is not None and failure.kind == "error" and problem in failure.detail + failure.traceback, failure


def test_a_program_that_does_not_exist(play: Play) -> None:
    _, failure = play(AGENT, {"command": "no-such-program --option"})
    assert failure is not None and "env.options.command='no-such-program --option'" in failure.detail


@pytest.mark.parametrize("code", ["", "import sys; row = sys.stdin.read(); assert len(row) > 5 * 10**6; "])
def test_large_rows_and_outputs(code: str, play: Play) -> None:
    """Of a program that reads its row or not; only the end of the output counts."""
    turns, failure = play(AGENT, program(f"{code}print('x' * 5 * 10**6); print(0.5)"), {"text": "x" * 5 * 10**6})
    assert failure is None and turns[-1].reward == 0.5


@pytest.mark.slow
def test_many_agents_at_a_time() -> None:
    """More connections than the soft limit of open files, all of which wait for their replies."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    n = 200
    pool = EnvPool(EnvOptions(f"{FUNCTIONS}:brief", {}, 1, TIMEOUT_S, max_concurrency=n))
    rewards, waiting, end = list[float](), list[int](), time.monotonic() + TIMEOUT_S
    try:
        for number in range(n):
            pool.reset(number, {}, number)
        while len(rewards) < n and time.monotonic() < end:
            for answer in pool.poll(1.0):
                assert isinstance(answer.result, Turn), answer.result
                if answer.result.done:
                    rewards.append(answer.result.reward)
                else:
                    waiting.append(answer.episode)
            if len(waiting) == n:
                for number in waiting:
                    pool.step(number, Reply("yes", [1]))
                waiting.clear()
    finally:
        pool.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert rewards == [1.0] * n


@pytest.mark.parametrize("how", ["timeout", "pool"])
def test_nothing_of_a_program_is_left(how: str, play: Play, tmp_path: Path) -> None:
    """A program that hangs, and its children, are killed with the episode, or with the pool."""
    code = (
        "import subprocess, sys, json, time, os; from pathlib import Path; "
        "child = subprocess.Popen(['sleep', '1000']); "
        f"Path({str(tmp_path / 'pids')!r}).write_text(json.dumps([os.getpid(), child.pid])); "
    )
    if how == "timeout":
        _, failure = play(AGENT, program(code + "time.sleep(1000)"), timeout=3.0)
        assert failure is not None and failure.kind == "timeout"
    else:
        pool = EnvPool(EnvOptions(AGENT, program(code + "time.sleep(1000)"), 1, 60.0))
        pool.reset(0, {}, 5)
        end = time.monotonic() + TIMEOUT_S
        while not (tmp_path / "pids").exists() and time.monotonic() < end:
            pool.poll(0.1)
        time.sleep(0.2)
        pool.close()
    pids = json.loads((tmp_path / "pids").read_text())
    end = time.monotonic() + 10
    while any(map(is_running, pids)) and time.monotonic() < end:
        time.sleep(0.05)
    assert not any(map(is_running, pids))


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False
