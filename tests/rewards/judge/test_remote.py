"""Remote judges: services that work, reject requests, fail temporarily, send invalid replies or hang."""

import json
import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from hypothesis import given
from hypothesis import strategies as st

from realhf.base.errors import UserError
from realhf.rewards.judge.remote import BATCH, RemoteJudge, read_verdict
from realhf.rewards.verdict import Status, Verdict
from tests.conftest import TIMEOUT_S

ITEMS = [("Q", str(n), {"n": n}) for n in range(BATCH + 3)]


class Service(BaseHTTPRequestHandler):
    """Scores each response as its number; the path selects a fault, ``/unavailable`` recovers after two failures."""

    seen: list[tuple[str, str | None, int]] = []

    def do_POST(self) -> None:
        items = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["items"]
        self.seen.append((self.path, self.headers["Authorization"], len(items)))
        body = json.dumps({"results": [{"score": float(item["answer"])} for item in items]}).encode()
        status = 200
        match self.path:
            case "/unavailable" if len(self.seen) < 3:
                status = 503
            case "/broken":
                status, body = 500, b"out of order"
            case "/forbidden":
                status, body = 403, b"not you"
            case "/few":
                body = b'{"results": []}'
            case "/html":
                body = b"<html>"
            case "/hang":
                time.sleep(3)
            case "/endless":
                body = b"x" * 2**24 + b"xx"
        self.send_response(status)
        self.end_headers()
        for byte in body if self.path == "/drip" else []:
            self.wfile.write(bytes([byte]))
            time.sleep(0.1)
        if self.path != "/drip":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def address() -> Iterator[str]:
    Service.seen.clear()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Service)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_batches_keep_the_order_of_items(address: str) -> None:
    judge = RemoteJudge(f"{address}/fine?fn=x", timeout=TIMEOUT_S, connections=2, token="secret")
    judge.self_test()
    assert judge.judge(ITEMS) == [Verdict(float(n), Status.ok) for n in range(BATCH + 3)]
    assert sorted(Service.seen) == [("/fine?fn=x", "Bearer secret", n) for n in (0, 3, BATCH)]
    assert judge.judge([]) == [] and "secret" not in repr(judge)


def test_temporary_failures_are_retried(address: str) -> None:
    assert RemoteJudge(f"{address}/unavailable", timeout=TIMEOUT_S).judge(ITEMS[:2])[1] == Verdict(1.0, Status.ok)
    assert [n for _, _, n in Service.seen] == [2, 2, 2]


@pytest.mark.parametrize(
    ("path", "tries", "detail"),
    [
        ("broken", 2, "HTTP status 500: out of order"),
        ("forbidden", 1, "HTTP status 403: not you"),
        ("few", 1, "'results' must be a list of 2, got []"),
        ("endless", 1, "the reply is longer than 16777216 bytes"),
        ("html", 1, "the reply is not a JSON object with 'results': '<html>'"),
    ],
)
def test_failed_request_fails_all_its_items(address: str, path: str, tries: int, detail: str) -> None:
    judge = RemoteJudge(f"{address}/{path}", timeout=TIMEOUT_S, retries=1)
    assert judge.judge(ITEMS[:2]) == [Verdict(0.0, Status.error, f"{address}/{path}: {detail}")] * 2
    assert len(Service.seen) == tries


@pytest.mark.parametrize("path", ["hang", "drip"])
def test_request_ends_at_its_deadline(address: str, path: str) -> None:
    (verdict,) = RemoteJudge(f"{address}/{path}", timeout=0.5).judge(ITEMS[:1])
    assert (verdict.status, "no result within the deadline" in verdict.detail) == (Status.error, True)


def test_unreachable_service_is_a_user_error() -> None:
    with socket.socket() as link:
        link.bind(("127.0.0.1", 0))
        port = link.getsockname()[1]
    judge = RemoteJudge(f"http://127.0.0.1:{port}/", timeout=5.0, retries=1)
    with pytest.raises(UserError, match=r"reward.fn='http://127.0.0.1:\d+/': ConnectionRefusedError"):
        judge.self_test()
    assert judge.judge(ITEMS[:1])[0].status is Status.error


@pytest.mark.parametrize(
    ("result", "status", "score"),
    [
        ({"score": 0.5, "reason": "half"}, Status.ok, 0.5),
        ({"score": 1}, Status.ok, 1.0),
        ({"score": True}, Status.error, 0.0),
        ({"score": float("nan")}, Status.error, 0.0),
        ({"score": float("inf")}, Status.error, 0.0),
        ({"score": 10**400}, Status.error, 0.0),
        ({"score": "1"}, Status.error, 0.0),
        ({"timeout": True}, Status.timeout, 0.0),
        ({"error": "no"}, Status.error, 0.0),
        (None, Status.error, 0.0),
    ],
)
def test_read_verdict(result: object, status: Status, score: float) -> None:
    verdict = read_verdict(result)
    assert (verdict.status, verdict.score) == (status, score)


JSON = st.recursive(st.none() | st.booleans() | st.floats() | st.text() | st.integers(), lambda inner: st.lists(inner)
                    | st.dictionaries(st.sampled_from(["score", "error", "timeout"]) | st.text(), inner))  # fmt: skip


@given(JSON)
def test_read_verdict_accepts_any_json(result: object) -> None:
    assert read_verdict(result).status in Status
