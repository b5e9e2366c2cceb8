"""The served page: one address with a secret, GET only, and a new page when files change."""

import contextlib
import http.client
import json
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from realhf.apps.view.report import server as server_module
from realhf.apps.view.report.run_set import RunSet
from realhf.apps.view.report.server import HOST, MAX_THREADS, LivePage, ReportServer, serve
from realhf.base.errors import UserError
from tests.conftest import TIMEOUT_S


def step(number: int) -> str:
    return json.dumps({"step": number, "loss": 1 / number}) + "\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "run"
    root.mkdir()
    (root / "metrics.jsonl").write_text(step(1))
    return root


@pytest.fixture
def server(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ReportServer]:
    monkeypatch.setattr(server_module, "MIN_INTERVAL_S", 0.0)
    with ReportServer(LivePage(RunSet([folder])), 0) as served:
        thread = threading.Thread(target=served.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield served
        served.shutdown()
        thread.join()


def ask(server: ReportServer, path: str | None = None, method: str = "GET", **headers: str) -> tuple[int, str, str]:
    """Return status, body and entity tag."""
    with contextlib.closing(http.client.HTTPConnection(HOST, server.server_port, timeout=TIMEOUT_S)) as connection:
        connection.request(method, server.path if path is None else path, headers=headers)
        answer = connection.getresponse()
        assert answer.headers["X-Content-Type-Options"] == "nosniff" and answer.headers["Cache-Control"] == "no-store"
        return answer.status, answer.read().decode(), answer.headers.get("ETag", "")


def test_a_page_is_sent_again_only_after_a_change(server: ReportServer, folder: Path) -> None:
    status, page, tag = ask(server)
    assert status == 200 and "connect-src &#39;self&#39;" in page and '"follow":2000' in page
    assert ask(server, **{"If-None-Match": tag}) == (304, "", tag)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(step(2))
    status, changed, other = ask(server, **{"If-None-Match": tag})
    assert status == 200 and other != tag and '"steps":[[1,2]]' in changed


def test_compressed_pages(server: ReportServer) -> None:
    with contextlib.closing(http.client.HTTPConnection(HOST, server.server_port, timeout=TIMEOUT_S)) as connection:
        connection.request("GET", server.path, headers={"Accept-Encoding": "gzip"})
        answer = connection.getresponse()
        assert answer.headers["Content-Encoding"] == "gzip" and answer.read()[:2] == b"\x1f\x8b"


@pytest.mark.parametrize("host", ["evil.example", "evil.example:{port}", "127.0.0.1", "127.0.0.1:1", ""])
def test_other_hosts_are_refused(server: ReportServer, host: str) -> None:
    assert ask(server, Host=host.format(port=server.server_port))[0] == 421
    assert ask(server, Host=f"localhost:{server.server_port}")[0] == 200


@pytest.mark.parametrize("path", ["/", "/x/", "{}metrics.jsonl", "{}../../etc/passwd", "//etc/passwd", "/%2e%2e/"])
def test_other_paths_are_not_found(server: ReportServer, path: str) -> None:
    status, body, _ = ask(server, path.format(server.path))
    assert status == 404 and body == "not found\n"


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "HEAD", "OPTIONS", "TRACE", "PATCH"])
def test_other_methods_are_refused(server: ReportServer, method: str) -> None:
    assert ask(server, method=method)[0] == 405


def test_two_readers_at_once_and_a_removed_directory(server: ReportServer, folder: Path) -> None:
    answers: list[tuple[int, str, str]] = []
    threads = [threading.Thread(target=lambda: answers.append(ask(server))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(answers) == 8 and {answer[::2] for answer in answers} == {(200, answers[0][2])}
    shutil.rmtree(folder)
    status, page, _ = ask(server)
    assert status == 200 and "no longer exists" in page and '"loss"' in page, "what has been read stays"
    assert ask(server)[1].count("no longer exists: this page shows what was read") == 1


def test_more_connections_than_threads_are_closed(server: ReportServer) -> None:
    with contextlib.ExitStack() as stack:
        idle = [
            stack.enter_context(socket.create_connection((HOST, server.server_port))) for _ in range(MAX_THREADS + 5)
        ]
        closed = 0
        for connection in idle[MAX_THREADS:]:
            connection.settimeout(TIMEOUT_S)
            with contextlib.suppress(ConnectionResetError):
                assert connection.recv(1) == b""
            closed += 1
        assert closed == 5
    deadline = time.monotonic() + TIMEOUT_S
    while True:  # the threads notice the end of their connections
        with contextlib.suppress(ConnectionError, http.client.HTTPException):
            assert ask(server)[0] == 200
            break
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_port_in_use_is_an_error(server: ReportServer, folder: Path) -> None:
    with pytest.raises(UserError, match=f"--port {server.server_port}: "):
        serve(RunSet([folder]), server.server_port)
