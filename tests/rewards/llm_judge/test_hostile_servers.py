"""Servers that break HTTP: every one is a failure within the deadline, and none raises."""

import contextlib
import http.client
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from realhf.api.config import LLMJudgeConfig
from realhf.rewards.llm_judge.judge import LLMJudge
from realhf.rewards.verdict import ResponseGroup, Status

OK = b"HTTP/1.1 200 OK\r\n"
PATIENCE = 30.0  # of a judge whose server ends or breaks its reply: no limit on a busy machine
LATE = "within 0.5 s (reward.judge.timeout)"
WORDS = {  # what a server sends after a request, and a part of the failure
    "garbage": (b"\x00\xff garbage\r\n\r\n", "RemoteProtocolError"),
    "half a body": (OK + b"Content-Length: 500\r\n\r\n{", "RemoteProtocolError"),
    "two lengths": (OK + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\n12345", "RemoteProtocolError"),
    "an endless chunk": (OK + b"Transfer-Encoding: chunked\r\n\r\nFFFFFFFFFFFF\r\n", "RemoteProtocolError"),
    "compressed": (
        OK + b"Content-Encoding: gzip\r\nContent-Length: 4\r\n\r\n\x1f\x8b\x08\x00",
        "not a chat",
    ),
    "another place": (b"HTTP/1.1 307 X\r\nLocation: http://127.0.0.1:1/\r\nContent-Length: 0\r\n\r\n", "status 307"),
    "no content": (b"HTTP/1.1 204 X\r\n\r\n", "status 204"),
    "an unknown status": (b"HTTP/1.1 999 X\r\nContent-Length: 0\r\n\r\n", "status 999"),
    "a pause of years": (b"HTTP/1.1 429 X\r\nRetry-After: 1e99\r\nContent-Length: 0\r\n\r\n", "status 429"),
    "an end": (b"", ""),
}


def read_request(connection: socket.socket) -> None:
    with connection.makefile("rb") as request:
        request.readline()
        request.read(int(http.client.parse_headers(request).get("Content-Length", 0)))


@contextmanager
def server(talk: Callable[[socket.socket], None]) -> Iterator[str]:
    """Accept connections, read a whole request, and ``talk``.

    To close a connection with unread bytes resets it, and the client may lose what was sent.
    """
    listener = socket.create_server(("127.0.0.1", 0))

    def serve(connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            read_request(connection)
            talk(connection)

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()


def failure(talk: Callable[[socket.socket], None], folder: Path, retries: int = 0, timeout: float = PATIENCE) -> str:
    with server(talk) as url:
        config = LLMJudgeConfig(base_url=url, model="m", retries=retries, timeout=timeout)
        ((verdict,),) = LLMJudge("rubric", config, folder).judge_groups([ResponseGroup("q", ("a",), {})])
    assert verdict.status is Status.error
    return verdict.detail


@pytest.mark.parametrize("name", WORDS)
def test_servers_that_break_http(name: str, tmp_path: Path) -> None:
    data, message = WORDS[name]
    assert message in failure(lambda connection: connection.sendall(data), tmp_path)


def test_a_pause_beyond_the_deadline_is_not_waited_for(tmp_path: Path) -> None:
    data, _ = WORDS["a pause of years"]
    detail = failure(lambda connection: connection.sendall(data), tmp_path, retries=3)
    assert detail.startswith("no reply after 1 attempt (reward.judge.retries=3); the next is due in 1000000 s, after")


def never(connection: socket.socket) -> None:
    while connection.recv(65536):  # until the client leaves
        pass


def drip(connection: socket.socket) -> None:
    connection.sendall(OK + b"Content-Length: 100000\r\n\r\n")
    while True:
        connection.sendall(b" ")
        time.sleep(0.02)


def endless_headers(connection: socket.socket) -> None:
    connection.sendall(OK)
    while True:
        connection.sendall(b"X-A: " + b"a" * 1000 + b"\r\n")


def endless_body(connection: socket.socket) -> None:
    connection.sendall(OK + b"Content-Length: 999999999999\r\n\r\n")
    while True:
        connection.sendall(b" " * 65536)


@pytest.mark.parametrize(
    ("talk", "message"),
    [
        (never, LATE),
        (drip, LATE),
        (endless_headers, "RemoteProtocolError"),
        (endless_body, "longer than 4194304"),
    ],
)
def test_servers_that_do_not_end(talk: Callable[[socket.socket], None], message: str, tmp_path: Path) -> None:
    assert message in failure(talk, tmp_path, timeout=0.5 if message is LATE else PATIENCE)
