"""Rewards from a service: answers are posted in batches of JSON, within a deadline, and tried again a few times.

A request is ``{"items": [{"prompt": ..., "answer": ..., "row": {...}}, ...]}``, its reply ``{"results": [...]}`` with
``{"score": x}``, ``{"error": text}`` or ``{"timeout": true}`` for every item, as ``realhf verifier serve`` gives them.
"""

import contextlib
import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from realhf.base.errors import UserError
from realhf.rewards.judge.pool import Item
from realhf.rewards.verdict import Status, Verdict

BATCH = 16
"""Items of one request."""
LONGEST_REPLY = 16 * 2**20  # bytes
FIRST_PAUSE = 0.2
"""Seconds before the second try; the next pauses are twice as long each."""
LATE = "no result within the deadline (reward.timeout for each answer)"
TRY_AGAIN = (408, 425, 429, 500, 502, 503, 504)


class ServiceError(Exception):
    """The service answered, and will not do what it is asked."""


@dataclass(frozen=True)
class RemoteJudge:
    """Judges by a service at ``url``, with up to ``connections`` requests at a time.

    A request of n items has ``timeout`` * n seconds, all its tries together (``retries`` more than one). The bearer
    ``token`` is sent and never shown. Items of a request that fails are failed verdicts.
    """

    url: str
    timeout: float
    connections: int = 1
    retries: int = 3
    token: str = field(default="", repr=False)

    def start(self) -> None:
        """Ask for nothing, to find out whether the service is there and lets us in; UserError if not."""
        try:
            self._results([], time.monotonic() + self.timeout)
        except (OSError, http.client.HTTPException, ServiceError) as error:
            raise UserError(f"reward.fn={self.url!r}: {describe(error)}") from None

    def self_test(self) -> None:
        self.start()

    def judge(self, items: Sequence[Item]) -> list[Verdict]:
        """Return the verdicts on ``(prompt, answer, row)`` items, in order."""
        batches = [items[i : i + BATCH] for i in range(0, len(items), BATCH)]
        with ThreadPoolExecutor(self.connections) as threads:
            return [verdict for batch in threads.map(self._judge_batch, batches) for verdict in batch]

    def close(self) -> None:
        """Nothing is kept open."""

    def _judge_batch(self, items: Sequence[Item]) -> list[Verdict]:
        try:
            results = self._results(items, time.monotonic() + self.timeout * len(items))
        except TimeoutError as error:
            return [Verdict(0.0, Status.timeout, f"{self.url}: {describe(error)}")] * len(items)
        except (OSError, http.client.HTTPException, ServiceError) as error:
            return [Verdict(0.0, Status.error, f"{self.url}: {describe(error)}")] * len(items)
        return [read_verdict(result) for result in results]

    def _results(self, items: Sequence[Item], deadline: float) -> list:
        """Return the service's results, as many as items; what fails in passing is tried again."""
        body = json.dumps({"items": [{"prompt": p, "answer": a, "row": row} for p, a, row in items]}).encode()
        pause = FIRST_PAUSE
        for tries_left in reversed(range(self.retries + 1)):
            try:
                status, reply = self._post(body, deadline)
                if status == 200:
                    return check_results(reply, len(items))
                if status not in TRY_AGAIN or not tries_left:
                    raise ServiceError(f"HTTP status {status}: {reply[:300].decode(errors='replace')}")
            except (OSError, http.client.HTTPException):
                if not tries_left or time.monotonic() + pause >= deadline:
                    raise
            if time.monotonic() + pause >= deadline:
                raise TimeoutError(LATE)
            time.sleep(pause)
            pause *= 2
        raise AssertionError("the last try returns or raises")

    def _post(self, body: bytes, deadline: float) -> tuple[int, bytes]:
        headers = {"Content-Type": "application/json"}
        if self.token:
            headers["Authorization"] = f"Bearer {self.token}"
        parts = urlsplit(self.url)
        target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        with connected(self.url, deadline) as connection:
            connection.request("POST", target, body, headers)
            response = connection.getresponse()
            return response.status, read_all(response)


@contextlib.contextmanager
def connected(url: str, deadline: float) -> Iterator[http.client.HTTPConnection]:
    """Open a connection, without any proxy, that breaks off with TimeoutError at ``deadline`` (monotonic seconds)."""
    parts = urlsplit(url)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError(LATE)
    connection = kind(parts.hostname or "", parts.port, timeout=left)
    late = threading.Event()

    def cut(link: socket.socket) -> None:  # who sends a byte now and then never lets a socket's own timeout expire
        late.set()
        with contextlib.suppress(OSError):
            link.shutdown(socket.SHUT_RDWR)

    timer = threading.Timer(0.0, cut)
    try:
        connection.connect()
        timer = threading.Timer(deadline - time.monotonic(), cut, [connection.sock])
        timer.daemon = True
        timer.start()
        yield connection
        if late.is_set():  # what came was cut short
            raise TimeoutError
    except (OSError, http.client.HTTPException) as error:
        if late.is_set() or isinstance(error, TimeoutError):
            raise TimeoutError(LATE) from None
        raise
    finally:
        timer.cancel()
        connection.close()


def read_all(response: http.client.HTTPResponse) -> bytes:
    body = response.read(LONGEST_REPLY + 1)
    if len(body) > LONGEST_REPLY:
        raise ServiceError(f"the reply is longer than {LONGEST_REPLY} bytes")
    return body


def check_results(reply: bytes, count: int) -> list:
    """Return the results in a reply; Refused where it is anything else than ``count`` of them."""
    try:
        results = json.loads(reply)["results"]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise ServiceError(
            f"the reply is no JSON object with 'results': {reply[:200].decode(errors='replace')!r}"
        ) from None
    if not isinstance(results, list) or len(results) != count:
        raise ServiceError(f"'results' must be a list of {count}, it is {results!r:.200}")
    return results


def read_verdict(result: object) -> Verdict:
    """Return the verdict that one of the results stands for; one that makes no sense is an error."""
    match result:
        case {"score": bool()}:
            pass
        case {"score": int() | float() as score, **others} if abs(score) < 1e300:
            return Verdict(float(score), Status.ok, str(others.get("reason", ""))[:1000])
        case {"timeout": _}:
            return Verdict(0.0, Status.timeout, "the service gave up on this answer in time")
        case {"error": str() as text}:
            return Verdict(0.0, Status.error, text[:1000])
    return Verdict(0.0, Status.error, f"the service's result is {result!r:.200}, without a finite 'score'")


def describe(error: Exception) -> str:
    return str(error) if isinstance(error, ServiceError | TimeoutError) else f"{type(error).__name__}: {error}"


def check_url(url: str) -> list[str]:
    """Return what is wrong with the address of a service: one line per problem."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        return [f"reward.fn={url!r}: {error}"]
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0:
        return [f"reward.fn={url!r} is no address like http://host:port/path"]
    if parts.username or parts.password:
        return [f"reward.fn has a password in the address of {parts.hostname}; use reward.token_env"]
    if not url.isascii() or any(char.isspace() for char in url):
        return [f"reward.fn={url!r}: an address has no spaces and no letters beyond ASCII"]
    return []
