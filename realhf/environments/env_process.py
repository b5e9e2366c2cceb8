"""One child process of an environment pool: its requests and its pipes."""

import contextlib
import json
import os
import select
import signal
import sys
import time
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from subprocess import PIPE, Popen
from typing import Any

STARTUP_S = 60.0
MAX_SENT = 256
"""Requests that a process has received and not answered; one that executes one at a time takes the next by itself."""
Json = dict[str, Any]


@dataclass(frozen=True)
class EnvOptions:
    """Options of a pool. ``timeout`` is in seconds, per request; ``max_concurrency`` is for ``async`` environments.

    ``tool_format``, a key of ``TOOL_CALL_PARSERS``, is how replies call tools. ``sandbox`` isolates the processes after
    they have loaded the class.
    """

    cls: str
    options: Json = field(default_factory=dict)
    workers: int = 1
    timeout: float = 30.0
    max_concurrency: int = 64
    memory_gb: float = 4.0
    tool_format: str = "hermes"
    sandbox: bool = False


@dataclass(eq=False)
class EnvRequest:
    number: int
    episode: int
    op: str
    fields: Json
    expected: Json | None = None  # of a request that is played again
    started: float = 0.0

    @property
    def line(self) -> bytes:
        return json.dumps({"id": self.number, "episode": self.episode, "op": self.op, **self.fields}).encode() + b"\n"


class EnvProcess:
    """One child process: requests that wait for it, those it has received, and the requests of its open episodes.

    It executes its requests in turn, or all at once if the environment's methods are ``async``.
    """

    def __init__(self, options: EnvOptions) -> None:
        self.options = options
        self.process: Popen[bytes] | None = None
        self.is_ready = self.is_async = False
        self.ready_by = 0.0
        self.serial = False  # an async process executes one request at a time
        self.n_starts = 0  # that ended before the process was ready
        self.deaths = Counter[int]()  # by episode
        self.waiting = deque[EnvRequest]()
        self.running: dict[int, EnvRequest] = {}
        self.history: dict[int, list[tuple[EnvRequest, Json | None]]] = {}
        self._unsent, self._received = bytearray(), bytearray()

    def spawn(self) -> None:
        options = {**asdict(self.options)}
        command = [sys.executable, "-m", "realhf.environments.server", json.dumps(options)]
        self.process = Popen(command, stdin=PIPE, stdout=PIPE, bufsize=0, start_new_session=True)
        self.is_ready, self.ready_by = False, time.monotonic() + STARTUP_S
        self._unsent, self._received = bytearray(), bytearray()
        for fd in self.fds:
            os.set_blocking(fd, False)

    @property
    def fds(self) -> tuple[int, int]:
        assert self.process is not None and self.process.stdin is not None and self.process.stdout is not None
        return self.process.stdin.fileno(), self.process.stdout.fileno()

    @property
    def events(self) -> int:
        return select.POLLOUT if self._unsent else 0

    @property
    def deadline(self) -> float:
        if self.process is None:
            return float("inf")
        if not self.is_ready:
            return self.ready_by
        return min((one.started + self.options.timeout for one in self.executing), default=float("inf"))

    @property
    def executing(self) -> list[EnvRequest]:
        requests = list(self.running.values())
        return requests if self.is_async else requests[:1]

    def set_ready(self, is_async: bool) -> None:
        self.is_ready, self.is_async, self.n_starts = True, is_async, 0

    def answered(self, number: int) -> None:
        """Remove a request that the process has answered; the next one starts."""
        del self.running[number]
        for one in () if self.is_async else self.executing:
            one.started = time.monotonic()

    @property
    def _most_sent(self) -> int:
        if not self.is_ready:
            return 0
        if self.is_async:
            return 1 if self.serial else self.options.max_concurrency
        return MAX_SENT

    def send(self) -> bool:
        """Send waiting requests, those of an episode in turn; return False if the process has ended."""
        kept, most = deque[EnvRequest](), self._most_sent
        busy = {one.episode for one in self.running.values()} if self.is_async else set[int]()
        while self.waiting and len(self.running) < most:
            request = self.waiting.popleft()
            if self.is_async and request.episode in busy:
                kept.append(request)
                continue
            busy.add(request.episode)
            request.started = time.monotonic()
            self.running[request.number] = request
            self._unsent += request.line
        self.waiting = kept + self.waiting
        while self._unsent:
            try:
                del self._unsent[: os.write(self.fds[0], self._unsent[: 1 << 16])]
            except BlockingIOError:
                break
            except BrokenPipeError:
                return False
        return True

    def receive(self) -> Iterator[Json]:
        """Yield the messages that have arrived; then EOFError if the process has ended."""
        chunk = b"\n"
        while chunk:
            try:
                chunk = os.read(self.fds[1], 1 << 20)
            except BlockingIOError:
                break
            self._received += chunk
        *lines, self._received = self._received.split(b"\n")
        for line in lines:
            yield json.loads(line)
        if not chunk:
            raise EOFError

    def kill(self) -> str:
        """Kill the process and its process group; return how it ended."""
        process, self.process = self.process, None
        if process is None:
            return ""
        for _ in range(20):  # the streams close shortly before the process ends
            if os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
                break
            time.sleep(0.005)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # not reaped yet, so the group id is not reused
        for stream in filter(None, (process.stdin, process.stdout)):
            stream.close()
        code = process.wait()
        return f"exit code {code}" if code >= 0 else str(signal.strsignal(-code))
