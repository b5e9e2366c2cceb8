"""Judges that hang, raise, die, print and lie, each costing its own answer and no other."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from realhf.base.errors import UserError
from realhf.rewards.judge.pool import JudgePool, check_reward_fn
from realhf.rewards.verdict import Status, Verdict

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
    with JudgePool(fn, timeout=20.0) as pool:
        yield pool


def one(pool: JudgePool, answer: str) -> Verdict:
    """The verdict on ``answer``, once the one after it has been found to be well."""
    verdict, after = pool.judge([("", answer, {}), ("", "fine", {"value": 21})])
    assert after == Verdict(42.0, Status.ok)
    return verdict


def alive(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


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
def test_a_failing_judge_is_an_error_of_that_answer_alone(pool: JudgePool, answer: str, detail: str) -> None:
    assert one(pool, answer) == Verdict(0.0, Status.error, detail)


def test_what_the_function_prints_and_reads_is_not_the_protocol(pool: JudgePool) -> None:
    verdicts = pool.judge([("", "print", {"value": 1}), ("", "read", {})])
    assert verdicts == [Verdict(2.0, Status.ok), Verdict(0.0, Status.ok)]


def test_long_and_odd_texts_pass(pool: JudgePool) -> None:
    prompt = "\ud800\n\u2028\u00e9" * 100_000
    assert pool.judge([(prompt, "big", {})]) == [Verdict(float(len(prompt)), Status.ok)]


def test_an_answer_that_takes_too_long_costs_its_own_deadline(fn: str) -> None:
    with JudgePool(fn, timeout=1.0, processes=2) as pool:
        pool.start()
        answers = ["a", "sleep", "spin", "b", "c"]
        verdicts = pool.judge([("", answer, {"value": i}) for i, answer in enumerate(answers)])
    ok, timeout = Status.ok, Status.timeout
    assert [v.status for v in verdicts] == [ok, timeout, timeout, ok, ok]
    assert [v.score for v in verdicts] == [0, 0, 0, 6, 8]
    assert verdicts[1].detail == "no verdict after 1 s (reward.timeout)"


def test_no_process_is_left(fn: str) -> None:
    with JudgePool(fn, timeout=20.0, processes=2) as pool:
        pids = [int(v.score) for v in pool.judge([("", a, {}) for a in ("pid", "child", "pid", "child")])]
    for _ in range(500):  # the kernel takes a moment over what was killed
        if not any(map(alive, pids)):
            break
        time.sleep(0.01)
    assert not any(map(alive, pids))
    pool.close()


def test_no_items_start_no_process(fn: str) -> None:
    with JudgePool(fn, timeout=1.0) as pool:
        assert pool.judge([]) == []
        assert not any(child.running for child in pool.children)


def test_a_judge_ends_with_its_requests(fn: str) -> None:
    command = [sys.executable, "-m", "realhf.rewards.judge.server", fn, "5"]
    requests = "".join(json.dumps({"prompt": "", "answer": "", "row": {"value": v}}) + "\n" for v in (1, 2))
    done = subprocess.run(command, input=requests.encode(), stdout=subprocess.PIPE, timeout=60, check=True)
    assert [json.loads(line) for line in done.stdout.splitlines()] == [{"ready": True}, {"score": 2.0}, {"score": 4.0}]


def test_a_judge_that_hangs_does_not_outlive_its_parent(fn: str) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "realhf.rewards.judge.server", fn, "0.5"], stdin=subprocess.PIPE, start_new_session=True
    )
    process.communicate(json.dumps({"prompt": "", "answer": "sleep", "row": {}}).encode() + b"\n", timeout=60)
    assert process.returncode == -9


def test_math_passes_its_self_test() -> None:
    with JudgePool("math", timeout=20.0) as pool:
        pool.self_test()
        right, wrong = pool.judge([("", f"#### {n}", {"solutions": ["#### 5"]}) for n in (5, 6)])
    assert (right, wrong) == (Verdict(1.0, Status.ok), Verdict(0.0, Status.ok))


@pytest.mark.parametrize(
    ("fn", "words"),
    [
        ("maths", "neither math, code, code_unordered nor 'file.py:function'"),
        ("r.txt:f", "neither math, code"),
        ("none.py:f", "there is no file none.py"),
        ("broken.py:f", "broken.py is not valid Python"),
        ("good.py:reword", "does not define 'reword'  did you mean reward ?"),
    ],
)
def test_a_bad_name_is_found_without_running_anything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fn: str, words: str
) -> None:
    (tmp_path / "broken.py").write_text("def f(:")
    (tmp_path / "good.py").write_text("def reward(p, a, r): return 1\n1 / 0")
    monkeypatch.chdir(tmp_path)
    assert words in check_reward_fn(fn)[0]
    with pytest.raises(UserError, match="reward.fn"):
        JudgePool(fn, timeout=1.0)


def test_functions_made_in_other_ways_count_too(tmp_path: Path) -> None:
    file = tmp_path / "r.py"
    file.write_text("from x import a as b\nimport c\nif True:\n    d = e = len\nclass f: pass\n")
    assert [check_reward_fn(f"{file}:{name}") for name in "bcdef"] == [[]] * 5
    assert check_reward_fn("math") == []


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("import nowhere_to_be_found\nf = 1", "cannot be loaded: ModuleNotFoundError"),
        ("f = 1", "has no function 'f'"),
        ("import os\nf = len\nos._exit(4)", r"ended while it started \(exit code 4\)"),
        ("import time\nf = len\ntime.sleep(60)", "not ready after 1 s"),
    ],
)
def test_a_file_that_cannot_be_loaded_is_the_users_error(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "bad.py"
    file.write_text(text)
    startup = 1.0 if "sleep" in text else 60.0
    with JudgePool(f"{file}:f", timeout=1.0, startup_timeout=startup) as pool, pytest.raises(UserError, match=words):
        pool.judge([("", "", {})] * 3)


def test_the_pool_checks_its_numbers(fn: str) -> None:
    with pytest.raises(UserError, match="must be positive"):
        JudgePool(fn, timeout=0.0)


def test_a_path_is_kept_when_the_folder_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "r.py").write_text("def f(p, a, r): return 1")
    here = os.getcwd()
    monkeypatch.chdir(tmp_path)
    pool = JudgePool("r.py:f", timeout=20.0)
    monkeypatch.chdir(here)
    with pool:
        assert pool.judge([("", "", {})]) == [Verdict(1.0, Status.ok)]
