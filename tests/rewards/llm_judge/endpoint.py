"""A local endpoint with the chat completions of OpenAI's API, which fails as real ones do. By the standard library."""

import json
import random
import re
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

MARKED = r"{name} (<<\w+>>)\n(.*?)\n\1"


def part(text: str, name: str) -> str:
    """Return the text between the markers after ``name`` in a request of the default templates."""
    found = re.search(MARKED.format(name=name), text, re.DOTALL)
    assert found is not None, text
    return found[2]


def length_score(text: str) -> str:
    """Judge as a model would that counts the ones and the length of a response."""
    if "RESPONSE A <<" in text:
        a, b = (worth(part(text, f"RESPONSE {name}")) for name in "AB")
        return f"I compared them.\nWinner: {'tie' if a == b else 'A' if a > b else 'B'}"
    return f"It is fair.\nScore: {worth(part(text, 'RESPONSE'))}"


def worth(response: str) -> int:
    return min(10, response.count("1") + len(response) // 2)


@dataclass
class Faults:
    """How often an endpoint fails: shares of requests, by chance, and the seconds that a reply takes."""

    dropped: float = 0.0
    nonsense: float = 0.0
    busy: float = 0.0
    broken: float = 0.0
    seconds: float = 0.0
    seed: int = 0


@dataclass
class Endpoint:
    """A running endpoint. ``answer`` returns the text of a reply to a message, or the status and body of another."""

    answer: Callable[[str], str | tuple[int, str]] = length_score
    faults: Faults = field(default_factory=Faults)
    port: int = 0
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    tokens_in: int = 0
    tokens_out: int = 0
    most_at_once: int = 0
    _open: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.random = random.Random(self.faults.seed)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    def fate(self) -> str:
        """Return what happens to the next request."""
        f, x = self.faults, self.random.random()
        for name, share in (("dropped", f.dropped), ("nonsense", f.nonsense), ("busy", f.busy), ("broken", f.broken)):
            if x < share:
                return name
            x -= share
        return "answered"

    def handle(self, body: dict[str, Any]) -> tuple[str, int, str]:
        """Return the fate of a request, the status and the body of its reply; count the tokens of completions."""
        with self._lock:
            self._open += 1
            self.most_at_once = max(self.most_at_once, self._open)
            self.bodies.append(body)
            fate = self.fate()
            self.counts[fate] = self.counts.get(fate, 0) + 1
        time.sleep(self.faults.seconds)
        text = body["messages"][-1]["content"]
        reply: str | tuple[int, str] = "As a model I like both." if fate == "nonsense" else self.answer(text)
        with self._lock:
            self._open -= 1
            if fate == "busy":
                return fate, 429, json.dumps({"error": {"message": "slow down"}})
            if fate == "broken":
                return fate, 500, "oops"
            if isinstance(reply, tuple):
                return fate, *reply
            if fate == "dropped":
                return fate, 0, ""
            usage = {"prompt_tokens": len(text.split()), "completion_tokens": len(reply.split())}
            self.tokens_in += usage["prompt_tokens"]
            self.tokens_out += usage["completion_tokens"]
        choice = {"index": 0, "message": {"role": "assistant", "content": reply}, "finish_reason": "stop"}
        return fate, 200, json.dumps({"object": "chat.completion", "choices": [choice], "usage": usage})


@contextmanager
def served(endpoint: Endpoint) -> Iterator[Endpoint]:
    """Serve an endpoint on a free port of this machine."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            endpoint.headers.append(dict(self.headers))
            fate, status, reply = endpoint.handle(body)
            if fate == "dropped":  # a reset instead of an orderly end
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                self.close_connection = True
                return
            self.send_response(status)
            if fate == "busy":
                self.send_header("Retry-After", "0.05")
            self.send_header("Content-Length", str(len(reply.encode())))
            self.end_headers()
            self.wfile.write(reply.encode())

        def log_message(self, *_: object) -> None:
            """Write nothing."""

    class Server(ThreadingHTTPServer):
        request_queue_size = 256
        daemon_threads = True

        def handle_error(self, *_: object) -> None:
            """Write nothing when a client has gone."""

    server = Server(("127.0.0.1", endpoint.port), Handler)
    endpoint.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield endpoint
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
