"""Limits of connections: the rule on generated arrivals, and the real service under half-open connections."""

import contextlib
import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("fastapi", reason="needs the extra 'serve'")
pytest.importorskip("uvicorn", reason="needs the extra 'serve'")

from realhf.api.config import RewardConfig
from realhf.apps.commands.verifier_connections import crowded
from realhf.rewards.judge.pool import open_judge
from realhf.rewards.verdict import Status
from tests.conftest import TIMEOUT_S
from tests.scaling import examples

MINE = """
import pathlib, time

def slow(prompt, answer, row):
    folder = pathlib.Path(answer)
    (folder / "runs").touch()
    while not (folder / "ends").exists():
        time.sleep(0.01)
    return 1.0
"""
HALF = 500
PER_CLIENT = 64
PARTS = [b"", b"G", b"GET /health HTTP/1.1\r\nHost: x\r\n", b"POST /judge HTTP/1.1\r\nHost: x\r\n", b"\x16\x03"]


@settings(max_examples=examples(200))
@given(st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=60), st.integers(1, 4), st.integers(4, 8))
def test_limits_hold_and_a_client_replaces_its_own_oldest(
    arrivals: list[tuple[int, bool]], per_client: int, total: int
) -> None:
    """Each arrival is a client, and whether it stays idle; a new one replaces the oldest idle one, if any."""
    clients: dict[int, int] = {}
    idle: dict[int, bool] = {}
    for number, (client, is_idle) in enumerate(arrivals):
        others = crowded(clients, client, per_client, total)
        own = [n for n, owner in clients.items() if owner == client]
        assert others == (own if len(own) >= per_client else list(clients) if len(clients) >= total else [])
        victim = next((n for n in others if idle[n]), None)
        if victim is not None:
            del clients[victim]
        if victim is not None or not others:  # else status 503
            clients[number], idle[number] = client, is_idle
        assert len(clients) <= total and all([*clients.values()].count(c) <= per_client for c in clients.values())


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    file = tmp_path_factory.mktemp("mine") / "mine.py"
    file.write_text(MINE)
    command = [sys.executable, "-m", "realhf", "verifier", "serve", f"fn={file}:slow,code", "port=0", "processes=1",
               "timeout=60", f"max_client_connections={PER_CLIENT}"]  # fmt: skip
    process = subprocess.Popen(command, text=True, stdout=subprocess.PIPE)
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        assert line.startswith("serving slow, code on ")
        yield line.split()[-1].partition("/judge")[0]
    finally:
        process.kill()
        process.wait(TIMEOUT_S)
        process.stdout.close()


def health(address: str, source: str) -> int:
    host, port = address.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=30, source_address=(source, 0)) as client:
        client.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        return int(client.makefile("rb").readline().split()[1])


def is_closed(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        while connection.recv(4096):  # status 400 to what is not HTTP
            pass
        return True
    except BlockingIOError:
        return False
    except ConnectionError:
        return True


@pytest.mark.slow
def test_health_answers_under_half_open_connections(address: str, tmp_path: Path) -> None:
    """The same client and another one; a request in progress before the flood is not interrupted."""
    host, port = address.removeprefix("http://").split(":")
    judge = open_judge(f"{address}/judge?fn=slow", RewardConfig(timeout=TIMEOUT_S, retries=0))
    with ThreadPoolExecutor(1) as pool, contextlib.ExitStack() as stack:
        verdict = pool.submit(judge.judge, [("", str(tmp_path), {})])
        stack.callback((tmp_path / "ends").touch)
        end = time.monotonic() + TIMEOUT_S
        while not (tmp_path / "runs").exists():
            assert time.monotonic() < end and not verdict.done(), "the request is not in progress"
            time.sleep(0.01)
        connections = []
        for number in range(HALF):
            connection = stack.enter_context(socket.create_connection((host, int(port)), timeout=30))
            with contextlib.suppress(ConnectionError):
                connection.sendall(PARTS[number % len(PARTS)])
            connections.append(connection)
        assert [health(address, source) for source in ("127.0.0.1", "127.0.0.2", "127.0.0.1")] == [200] * 3
        assert sum(not is_closed(connection) for connection in connections) <= PER_CLIENT
        (tmp_path / "ends").touch()
        assert verdict.result(TIMEOUT_S)[0].score == 1.0


def test_busy_connections_are_kept_and_further_ones_get_503(address: str) -> None:
    """Requests whose bodies are incomplete occupy all connections of one client."""
    host, port = address.removeprefix("http://").split(":")
    head = b"POST /judge?fn=slow HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 12\r\n"
    body = b'{"items":[]}'
    with contextlib.ExitStack() as stack:
        connections = [
            stack.enter_context(socket.create_connection((host, int(port)), timeout=30)) for _ in range(PER_CLIENT)
        ]
        for connection in connections:
            connection.sendall(head + b"Expect: 100-continue\r\n\r\n")
        files = [stack.enter_context(connection.makefile("rb")) for connection in connections]
        for file in files:  # the service waits for the body
            assert file.readline().split()[1] == b"100" and file.readline() == b"\r\n"
        assert health(address, "127.0.0.1") == 503 and health(address, "127.0.0.2") == 200
        for connection in connections:
            connection.sendall(body)
        assert [file.readline().split()[1] for file in files] == [b"200"] * PER_CLIENT
    assert health(address, "127.0.0.1") == 200


@pytest.mark.slow
def test_rows_are_validated_by_the_service(address: str) -> None:
    """No tests score nothing; no ``fn_name`` means standard input; a right program passes 250 tests."""
    program = "```python\nprint(int(input()) + 1)\n```"
    tests = {"inputs": [str(n) for n in range(250)], "outputs": [str(n + 1) for n in range(250)]}
    invalid = [{}, {"input_output": None}, {"input_output": "{"}, {"input_output": {"inputs": [], "outputs": []}},
               {"input_output": {"inputs": ["1"], "outputs": []}}, {"input_output": {"inputs": [1], "outputs": ["2"]}},
               {"input_output": json.dumps({"inputs": [], "outputs": [], "fn_name": "f"})}]  # fmt: skip
    valid = [{"input_output": tests}, {"input_output": json.dumps({**tests, "fn_name": None})},
             {"input_output": {**tests, "fn_name": ""}}]  # fmt: skip
    judge = open_judge(f"{address}/judge?fn=code", RewardConfig(timeout=TIMEOUT_S))
    verdicts = judge.judge([("", program, row) for row in [*invalid, *valid]])
    assert [v.status for v in verdicts[: len(invalid)]] == [Status.error] * len(invalid)
    assert all("ValueError" in v.detail for v in verdicts[: len(invalid)])
    assert [(v.status, v.score) for v in verdicts[len(invalid) :]] == [(Status.ok, 1.0)] * len(valid)
    wrong = {**tests, "outputs": [*tests["outputs"][:-1], "0"]}
    assert judge.judge([("", program, {"input_output": wrong})])[0].score == 0.0
