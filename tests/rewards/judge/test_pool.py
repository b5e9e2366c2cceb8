"""Reward functions that hang, raise, exit or print: each failure affects its own response only."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path

import pytest

from realhf.api.config import RewardConfig
from realhf.base.errors import UserError
from realhf.rewards.judge.pool import JudgePool, judge_once, open_judge
from realhf.rewards.judge.remote import RemoteJudge
from realhf.rewards.verdict import Item, Status, Verdict
from tests.conftest import TIMEOUT_S
from tests.rewards.judge.processes import descendants, have_exited

REWARDS = """
import os, subprocess, sys, time
from sibling import TWO

def reward(prompt, answer, row):
    match answer:
        case "sleep":
            time.sleep(60)
        case "spin":
            10 ** 10 ** 10
        case "raise":
            raise RuntimeError("bad luck")
        case "quit":
            sys.exit(3)
        case "die":
            os._exit(7)
        case "print":
            print('{"score": 99}', flush=True)
            subprocess.run(["echo", "noise"])
            os.write(1, b"more noise")
        case "read":
            return float(len(sys.stdin.read()))
        case "child":
            return float(subprocess.Popen(["sleep", "600"]).pid)
        case "memory":
            return float(len(bytearray(20 * 2**30)))
        case "nan":
            return float("nan")
        case "text":
            return "1"
        case "none":
            return None
        case "big":
            return float(len(prompt))
        case "pid":
            return os.getpid()
    return row["value"] * TWO
"""


@pytest.fixture(scope="module")
def fn(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("fn")
    (folder / "sibling.py").write_text("TWO = 2")
    (folder / "mine.py").write_text(REWARDS)
    return f"{folder / 'mine.py'}:reward"


@pytest.fixture(scope="module")
def pool(fn: str) -> Iterator[JudgePool]:
    with closing(JudgePool(fn, timeout=TIMEOUT_S)) as pool:
        yield pool


def one(pool: JudgePool, answer: str) -> Verdict:
    """Return the verdict on ``answer`` after checking that the next response is judged correctly."""
    verdict, next_verdict = pool.judge([("", answer, {}), ("", "fine", {"value": 21})])
    assert next_verdict == Verdict(42.0, Status.ok)
    return verdict


@pytest.mark.parametrize(
    ("answer", "detail"),
    [
        ("raise", "RuntimeError: bad luck"),
        ("quit", "SystemExit: 3"),
        ("die", "the judge process ended (exit code 7)"),
        ("memory", "MemoryError: "),
        ("nan", "the reward is nan, it must be finite"),
        ("text", "the reward is '1', a str; it must be a number"),
        ("none", "the reward is None, a NoneType; it must be a number"),
    ],
)
def test_failure_affects_only_its_response(pool: JudgePool, answer: str, detail: str) -> None:
    assert one(pool, answer) == Verdict(0.0, Status.error, detail)


def test_stdin_and_stdout_of_the_function_are_not_the_protocol(pool: JudgePool) -> None:
    verdicts = pool.judge([("", "print", {"value": 1}), ("", "read", {})])
    assert verdicts == [Verdict(2.0, Status.ok), Verdict(0.0, Status.ok)]


def test_long_and_unusual_texts(pool: JudgePool) -> None:
    prompt = "\ud800\n\u2028\u00e9" * 100_000
    assert pool.judge([(prompt, "big", {})]) == [Verdict(float(len(prompt)), Status.ok)]


def test_timeout_affects_only_its_response(fn: str) -> None:
    with closing(JudgePool(fn, timeout=1.0, processes=2)) as pool:
        pool.start()
        answers = ["a", "sleep", "spin", "b", "c"]
        verdicts = pool.judge([("", answer, {"value": i}) for i, answer in enumerate(answers)])
    ok, timeout = Status.ok, Status.timeout
    assert [v.status for v in verdicts] == [ok, timeout, timeout, ok, ok]
    assert [v.score for v in verdicts] == [0, 0, 0, 6, 8]
    assert verdicts[1].detail == "no verdict after 1 s (reward.timeout)"


def test_close_kills_all_descendants(fn: str) -> None:
    with closing(JudgePool(fn, timeout=TIMEOUT_S, processes=2)) as pool:
        pids = {int(v.score) for v in pool.judge([("", a, {}) for a in ("pid", "child", "pid", "child")])}
    assert have_exited(pids)
    pool.close()


def test_no_items_start_no_process(fn: str) -> None:
    before = descendants()
    with closing(JudgePool(fn, timeout=1.0)) as pool:
        assert pool.judge([]) == []
        assert descendants() == before


def test_server_exits_at_end_of_input(fn: str) -> None:
    command = [sys.executable, "-m", "realhf.rewards.judge.server", fn, "5"]
    requests = "".join(json.dumps({"prompt": "", "answer": "", "row": {"value": v}}) + "\n" for v in (1, 2))
    done = subprocess.run(command, input=requests.encode(), stdout=subprocess.PIPE, timeout=TIMEOUT_S, check=True)
    assert [json.loads(line) for line in done.stdout.splitlines()] == [{"ready": True}, {"score": 2.0}, {"score": 4.0}]


def test_hanging_server_ends_after_its_parent(fn: str) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "realhf.rewards.judge.server", fn, "0.5"], stdin=subprocess.PIPE, start_new_session=True
    )
    process.communicate(json.dumps({"prompt": "", "answer": "sleep", "row": {}}).encode() + b"\n", timeout=TIMEOUT_S)
    assert process.returncode == -9


def test_math() -> None:
    with closing(JudgePool("math", timeout=TIMEOUT_S)) as pool:
        right, wrong = pool.judge([("", f"#### {n}", {"solutions": ["#### 5"]}) for n in (5, 6)])
    assert (right, wrong) == (Verdict(1.0, Status.ok), Verdict(0.0, Status.ok))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("import nowhere_to_be_found\nf = 1", "cannot be loaded: ModuleNotFoundError"),
        ("f = 1", "has no function 'f'"),
        ("import os\nf = len\nos._exit(4)", r"ended during startup \(exit code 4\)"),
        ("import time\nf = len\ntime.sleep(60)", "not ready after 1 s"),
    ],
)
def test_file_that_cannot_be_loaded_is_a_user_error(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "bad.py"
    file.write_text(text)
    startup = 1.0 if "sleep" in text else 60.0
    with (
        closing(JudgePool(f"{file}:f", timeout=1.0, startup_timeout=startup)) as pool,
        pytest.raises(UserError, match=words),
    ):
        pool.judge([("", "", {})] * 3)


def test_pool_checks_its_arguments(fn: str) -> None:
    with pytest.raises(UserError, match="must be positive"):
        JudgePool(fn, timeout=0.0)


def test_relative_path_is_resolved_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "r.py").write_text("def f(p, a, r): return 1")
    cwd = os.getcwd()
    monkeypatch.chdir(tmp_path)
    pool = JudgePool("r.py:f", timeout=TIMEOUT_S)
    monkeypatch.chdir(cwd)
    with closing(pool):
        assert pool.judge([("", "", {})]) == [Verdict(1.0, Status.ok)]


class CountingJudge:
    """Scores the n-th item of each call n, and records the items."""

    def __init__(self) -> None:
        self.items: list[Item] = []

    def self_test(self) -> None: ...

    def close(self) -> None: ...

    def judge(self, items: Sequence[Item]) -> list[Verdict]:
        self.items += items
        return [Verdict(float(n), Status.ok) for n in range(len(items))]


def test_equal_items_are_judged_once() -> None:
    items = [("p", "a", {"x": 1, "y": 2}), ("p", "b", {}), ("p", "a", {"y": 2, "x": 1}), ("q", "b", {}), ("p", "b", {})]
    judges = CountingJudge(), CountingJudge()
    for judge, verdicts in zip(judges, judge_once(judges, items), strict=True):
        assert [v.score for v in verdicts] == [0, 1, 0, 2, 1]
        assert [(p, a) for p, a, _ in judge.items] == [("p", "a"), ("p", "b"), ("q", "b")]
    assert judge_once(judges, []) == [[], []]


def test_open_judge_selects_pool_or_service(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKEN", "secret")
    config = RewardConfig(timeout=3.0, processes=2, retries=5, token_env="TOKEN")
    assert open_judge("http://h/x", config) == RemoteJudge("http://h/x", 3.0, 2, 5, "secret")
    judge = open_judge("math", config)
    assert isinstance(judge, JudgePool) and len(judge.children) == 2
