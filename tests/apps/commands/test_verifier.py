"""The service, in its own process: verdicts, and rejected requests."""

import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest

from realhf.api.config import RewardConfig
from realhf.apps.commands.verifier import ServeOptions, is_loopback, option_problems
from realhf.apps.main import run
from realhf.apps.prepare.options import read_options
from realhf.base.errors import UserError
from realhf.experiments.options.checks import reward_problems
from realhf.rewards.judge.pool import open_judge
from realhf.rewards.verdict import Status, Verdict
from tests.conftest import TIMEOUT_S

pytest.importorskip("fastapi", reason="needs the extra 'serve'")
pytest.importorskip("uvicorn", reason="needs the extra 'serve'")

MINE = """
import asyncio, time

def length(prompt, answer, row):
    if answer == "hang":
        time.sleep(60)
    return len(answer) * row["worth"]

async def later(prompt, answer, row):
    await asyncio.sleep(0.01)
    return float(answer)
"""
SECRET = "open-sesame"
NAMES = ("math", "length", "later")


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    file = tmp_path_factory.mktemp("mine") / "mine.py"
    file.write_text(MINE)
    words = [f"fn=math,{file}:length,{file}:later", "port=0", "processes=1", "timeout=5", "token_env=SERVICE_TOKEN",
             "max_items=40", "max_body_mb=0.1"]  # fmt: skip
    process = subprocess.Popen([sys.executable, "-m", "realhf", "verifier", "serve", *words], text=True,
                               stdout=subprocess.PIPE, env={**os.environ, "SERVICE_TOKEN": SECRET})  # fmt: skip
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        assert line.startswith("serving math, length, later on http://127.0.0.1:")
        yield line.split()[-1].partition("/judge")[0]
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.stdout.close()


@pytest.fixture
def token(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("MY_TOKEN", SECRET)
    return "MY_TOKEN"


def post(url: str, body: bytes, kind: str = "application/json", token: str = SECRET) -> tuple[int, dict]:
    headers = {"Content-Type": kind, "Authorization": f"Bearer {token}"}
    try:
        with urllib.request.urlopen(urllib.request.Request(url, body, headers), timeout=30) as reply:
            return reply.status, json.load(reply)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


def test_health_lists_the_rewards(address: str) -> None:
    with urllib.request.urlopen(f"{address}/health", timeout=30) as reply:
        health = json.load(reply)
    assert (health["status"], health["rewards"]) == ("ok", list(NAMES))


def test_math_through_a_remote_judge(address: str, token: str) -> None:
    config = RewardConfig(fn=f"{address}/judge?fn=math", token_env=token)
    assert reward_problems(config, 1) == []
    judge = open_judge(config.fn, config)
    judge.self_test()
    items = [("Q", f"#### {n}", {"solutions": ["#### 5"]}) for n in range(20)]
    assert judge.judge(items) == [Verdict(float(n == 5), Status.ok) for n in range(20)]


def test_failures_of_user_functions_affect_single_responses(address: str, token: str) -> None:
    config = RewardConfig(timeout=TIMEOUT_S, token_env=token)
    items = [("", "four", {"worth": 2}), ("", "x", {}), ("", "hang", {"worth": 1}), ("", "", {"worth": 1})]
    verdicts = open_judge(f"{address}/judge?fn=length", config).judge(items)
    assert [v.status for v in verdicts] == [Status.ok, Status.error, Status.timeout, Status.ok]
    assert verdicts[0].score == 8.0 and verdicts[1].detail == "KeyError: 'worth'"
    later = open_judge(f"{address}/judge?fn=later", config).judge([("", str(n), {}) for n in range(20)])
    assert [v.score for v in later] == list(range(20))


@pytest.mark.parametrize("variable", ["", "WRONG_TOKEN"])
def test_missing_or_wrong_token_is_a_user_error(address: str, variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WRONG_TOKEN", "guess")
    judge = open_judge(f"{address}/judge?fn=math", RewardConfig(token_env=variable))
    with pytest.raises(UserError, match="HTTP status 401: .*must send the bearer token"):
        judge.self_test()


@pytest.mark.parametrize(
    ("query", "body", "status", "words"),
    [
        ("", b'{"items": []}', 200, ""),
        ("?fn=maths", b'{"items": []}', 404, "unknown reward 'maths'; served: math, length, later  did you"),
        ("?fn=/etc/passwd:f", b'{"items": []}', 404, "unknown reward"),
        ("", b"{", 400, "the request is not valid JSON"),
        ("", b"[" * 50_000, 400, "the request is not valid JSON"),
        ("", b"[]", 400, "an object with a list 'items'"),
        ("", b'{"items": [{"prompt": "", "row": {}}]}', 400, "items[0] must be"),
        ("", b'{"items": [{"answer": "", "row": []}]}', 400, "items[0] must be"),
        ("", b'{"items": [{"answer": "", "more": 1}]}', 400, "items[0] must be"),
        ("", json.dumps({"items": [{"answer": ""}] * 41}).encode(), 413, "41 items, at most 40"),
        ("", b" " * 200_000, 413, "larger than 104857 bytes"),
    ],
)  # fmt: skip
def test_invalid_requests(address: str, query: str, body: bytes, status: int, words: str) -> None:
    found, reply = post(f"{address}/judge{query}", body)
    assert (found, words in reply.get("error", "")) == (status, True)


def test_requests_that_a_web_page_can_send_are_rejected(address: str) -> None:
    assert post(f"{address}/judge", b'{"items": []}', kind="text/plain")[0] == 415
    assert post(f"{address}/judge", b'{"items": []}', token="")[0] == 401


def read(*words: str) -> ServeOptions:
    return read_options(ServeOptions, words, option_problems)


def test_options_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("T", "x")
    options = read("port=0", "timeout=2.5", "host=0.0.0.0", "token_env=T")
    assert options == ServeOptions(port=0, timeout=2.5, host="0.0.0.0", token_env="T")


@pytest.mark.parametrize(
    ("words", "problems"),
    [
        (["prot=1", "port"], ["unknown option prot  did you mean port ?", "'port' is not of the form key=value"]),
        (["port=x"], ["port=x: expected int"]),
        (["port=70000", "processes=0"], ["port=70000: must be <= 65535", "processes=0: must be >= 1"]),
        (
            ["max_client_connections=9", "max_connections=8"],
            ["max_client_connections=9 must be at most max_connections=8"],
        ),
        (["max_connections=100000000"], ["max_client_connections=64 must be at most max_connections=10"]),
        (["max_client_connections=0"], ["max_client_connections=0: must be >= 1"]),
        (["host=0.0.0.0"], ["host=0.0.0.0 is not a loopback address"]),
        (["token_env=NO_SUCH_VARIABLE"], ["token_env=NO_SUCH_VARIABLE: this environment variable is not set"]),
        (["fn=math,math"], ["fn=math,math: the names math, math must differ"]),
        (["fn=http://a/b"], ["fn=http://a/b: a remote service cannot be served again"]),
        (["fn=mat"], ["reward.fn='mat' must be one of"]),
    ],
)
def test_invalid_options(words: list[str], problems: list[str]) -> None:
    with pytest.raises(UserError) as error:
        read(*words)
    assert [found.startswith(wanted) for found, wanted in zip(error.value.problems, problems, strict=True)] == [
        True
    ] * len(problems)


def test_loopback() -> None:
    assert [is_loopback(h) for h in ("127.0.0.1", "::1", "localhost", "0.0.0.0", "example.org")] == [1, 1, 1, 0, 0]


def test_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["verifier", "--help"]) == 0
    out = capsys.readouterr().out
    assert "port: int" in out and "code_unordered" in out
    assert run(["verifier"]) == 2 and run(["verifier", "serve", "port=-1"]) == 2
    assert "usage: realhf verifier serve" in capsys.readouterr().err
