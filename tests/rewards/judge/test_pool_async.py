"""Asynchronous reward functions: concurrent responses, with failures that affect only their own."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from realhf.rewards.judge.pool import JudgePool
from realhf.rewards.verdict import Status, Verdict
from tests.conftest import TIMEOUT_S

REWARDS = """
import asyncio, os, sys, time

now = most = 0

async def reward(prompt, answer, row):
    global now, most
    now += 1
    most = max(most, now)
    try:
        match answer:
            case "wait":
                await asyncio.sleep(0.05)
            case "sleep":
                await asyncio.sleep(60)
            case "block":
                time.sleep(60)
            case "die":
                os._exit(7)
            case "quit":
                sys.exit(3)
            case "raise":
                raise RuntimeError("bad luck")
            case "late":
                raise TimeoutError("of a service")
            case "text":
                return "1"
            case "most":
                return most
        return row["value"]
    finally:
        now -= 1

class Callable:
    async def __call__(self, prompt, answer, row):
        return await reward(prompt, answer, row)

thing = Callable()
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("fn") / "mine.py"
    path.write_text(REWARDS)
    return path


@pytest.fixture(scope="module", params=["reward", "thing"])
def pool(file: Path, request: pytest.FixtureRequest) -> Iterator[JudgePool]:
    with closing(JudgePool(f"{file}:{request.param}", timeout=TIMEOUT_S, max_concurrency=8)) as pool:
        yield pool


def items(*answers: str) -> list[tuple[str, str, dict]]:
    return [("", answer, {"value": i}) for i, answer in enumerate(answers)]


def test_concurrency_is_used_and_limited(pool: JudgePool) -> None:
    assert pool.judge(items(*["wait"] * 40)) == [Verdict(float(i), Status.ok) for i in range(40)]
    assert pool.judge(items("most")) == [Verdict(8.0, Status.ok)]


@pytest.mark.parametrize(
    ("answer", "detail"),
    [
        ("raise", "RuntimeError: bad luck"),
        ("late", "TimeoutError: of a service"),
        ("quit", "SystemExit: 3"),
        ("text", "the reward is '1', a str; it must be a number"),
        ("die", "the judge process ended (exit code 7)"),
    ],
)
def test_failure_affects_only_its_response(pool: JudgePool, answer: str, detail: str) -> None:
    verdicts = pool.judge(items("wait", answer, "wait", "fine"))
    assert verdicts[1] == Verdict(0.0, Status.error, detail)
    assert [verdicts[i] for i in (0, 2, 3)] == [Verdict(float(i), Status.ok) for i in (0, 2, 3)]


@pytest.mark.parametrize("answer", ["sleep", "block"])
def test_timeout_affects_only_its_response(file: Path, answer: str) -> None:
    with closing(JudgePool(f"{file}:reward", timeout=1.0)) as pool:
        verdicts = pool.judge(items("wait", answer, "wait", "fine"))
    assert verdicts[1] == Verdict(0.0, Status.timeout, "no verdict after 1 s (reward.timeout)")
    assert [verdicts[i] for i in (0, 2, 3)] == [Verdict(float(i), Status.ok) for i in (0, 2, 3)]
