"""Environments in child processes, with a deadline per request; a process that hangs is killed and replaced.

A process has the environments of many episodes. When it dies, they are played again in a new process, with the replies
that they have had; their turns must be the same. The request that it was executing fails at the second death.
"""

import contextlib
import json
import os
import select
import signal
import sys
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from subprocess import PIPE, Popen
from typing import Any

from realhf.base.errors import UserError
from realhf.environments.types import Reply, Turn, reply_to_json, turn_of

STARTUP_S = 60.0
MAX_DEATHS = 2
"""Deaths of a process at an episode's request, or before it is ready, that end the episode or the run."""
DIED, TIMEOUT, ERROR = "died", "timeout", "error"
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


@dataclass(frozen=True)
class EnvFailure:
    """Why an episode ended without a turn: ``kind`` is error, timeout or died."""

    kind: str
    detail: str
    traceback: str = ""


@dataclass(frozen=True)
class EnvAnswer:
    """The result of a request ``op``. ``seconds`` is the time from its start to the result."""

    episode: int
    result: Turn | EnvFailure
    seconds: float = 0.0
    op: str = ""


@dataclass
class PastRequest:
    """A request of an episode, and the turn that answered it, as JSON values."""

    op: str
    fields: Json
    turn: Json


@dataclass(eq=False)
class _EnvRequest:
    number: int
    episode: int
    op: str
    fields: Json
    expected: Json | None = None  # of a request that is played again
    started: float = 0.0

    @property
    def line(self) -> bytes:
        return json.dumps({"id": self.number, "episode": self.episode, "op": self.op, **self.fields}).encode() + b"\n"


class _EnvWorker:
    """One child process: requests that wait for it, those it executes, and the requests of its open episodes."""

    def __init__(self, options: EnvOptions) -> None:
        self.options = options
        self.process: Popen[bytes] | None = None
        self.capacity = 0  # requests at a time; 0 until the process is ready
        self.ready_by = 0.0
        self.serial = False
        self.n_starts = 0  # that ended before the process was ready
        self.deaths = Counter[int]()  # by episode
        self.waiting = deque[_EnvRequest]()
        self.running: dict[int, _EnvRequest] = {}
        self.history: dict[int, list[tuple[_EnvRequest, Json | None]]] = {}
        self._unsent, self._received = b"", b""

    def spawn(self) -> None:
        options = {**asdict(self.options)}
        command = [sys.executable, "-m", "realhf.environments.server", json.dumps(options)]
        self.process = Popen(command, stdin=PIPE, stdout=PIPE, bufsize=0, start_new_session=True)
        self.capacity, self.ready_by = 0, time.monotonic() + STARTUP_S
        self._unsent, self._received = b"", b""
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
        if not self.capacity:
            return self.ready_by
        return min((one.started + self.options.timeout for one in self.running.values()), default=float("inf"))

    def send(self) -> None:
        """Send requests up to the capacity, those of an episode in turn; EOFError if the process has ended."""
        capacity, kept = 1 if self.serial else self.capacity, deque[_EnvRequest]()
        busy = {one.episode for one in self.running.values()}
        while self.waiting and len(self.running) < capacity:
            request = self.waiting.popleft()
            if request.episode in busy:
                kept.append(request)
                continue
            busy.add(request.episode)
            request.started = time.monotonic()
            self.running[request.number] = request
            self._unsent += request.line
        self.waiting = kept + self.waiting
        while self._unsent:
            try:
                self._unsent = self._unsent[os.write(self.fds[0], self._unsent[: 1 << 16]) :]
            except BlockingIOError:
                return
            except BrokenPipeError:
                raise EOFError from None

    def receive(self) -> Iterator[Json]:
        """Yield the messages that have arrived; EOFError if the process has ended."""
        while True:
            try:
                chunk = os.read(self.fds[1], 1 << 20)
            except BlockingIOError:
                break
            if not chunk:
                raise EOFError
            self._received += chunk
        *lines, self._received = self._received.split(b"\n")
        for line in lines:
            yield json.loads(line)

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


class EnvPool:
    """``workers`` processes of environments of one class, started on first use; not thread-safe.

    An episode is a number, as from ``new_number``. It has at most one request at a time.
    """

    def __init__(self, options: EnvOptions) -> None:
        self.options = options
        self._workers = [_EnvWorker(options) for _ in range(options.workers)]
        self._worker_of: dict[int, _EnvWorker] = {}
        self._lost: dict[int, EnvFailure] = {}
        self._failed_requests: dict[int, tuple[list[PastRequest], _EnvRequest]] = {}
        self._number = 0
        self._n_episodes = 0

    def spawn(self) -> None:
        """Start all processes that do not run, without waiting until they are ready."""
        for worker in self._workers:
            if worker.process is None:
                worker.spawn()

    def new_number(self) -> int:
        self._n_episodes += 1
        return self._n_episodes - 1

    def reset(self, episode: int, row: Json, seed: int) -> None:
        """Start an episode in the process with the fewest."""
        self._place(episode)
        self._submit(episode, "reset", {"row": json.dumps(row), "seed": seed})

    def _place(self, episode: int) -> _EnvWorker:
        worker = min(self._workers, key=lambda one: len(one.history))
        self._worker_of[episode], worker.history[episode] = worker, []
        return worker

    def history(self, episode: int) -> list[PastRequest]:
        """Return the requests of an episode that waits for none, for ``restore``."""
        pairs = self._worker_of[episode].history[episode]
        return [PastRequest(request.op, request.fields, turn) for request, turn in pairs if turn is not None]

    def restore(self, episode: int, history: Sequence[PastRequest]) -> None:
        """Play an episode again up to where it was; it fails if a turn differs."""
        worker = self._place(episode)
        for one in history:
            self._number += 1
            request = _EnvRequest(self._number, episode, one.op, one.fields)
            worker.history[episode].append((request, one.turn))
            worker.waiting.append(replace(request, expected=one.turn))

    def retry(self, episode: int) -> None:
        """Play an episode that has failed again up to where it was, and repeat the request that has failed."""
        history, request = self._failed_requests.pop(episode)
        self.restore(episode, history)
        self._submit(episode, request.op, request.fields)

    def step(self, episode: int, reply: Reply) -> None:
        self._submit(episode, "step", {"reply": reply_to_json(reply)})

    def truncate(self, episode: int) -> None:
        """Request the last turn of an episode that ends at a limit."""
        self._submit(episode, "truncate", {})

    def _submit(self, episode: int, op: str, fields: Json) -> None:
        self._number += 1
        self._worker_of[episode].waiting.append(_EnvRequest(self._number, episode, op, fields))

    def end(self, episode: int) -> None:
        """Close an episode's environment, without waiting."""
        worker = self._worker_of.pop(episode, None)
        self._lost.pop(episode, None)
        self._failed_requests.pop(episode, None)
        if worker is not None and worker.history.pop(episode, None) is not None and worker.process is not None:
            self._number += 1
            worker.waiting.append(_EnvRequest(self._number, episode, "close", {}))

    def poll(self, wait_s: float = 0.0) -> list[EnvAnswer]:
        """Return the answers that have arrived; wait up to ``wait_s`` seconds for one."""
        until, answers = time.monotonic() + wait_s, list[EnvAnswer]()
        while True:
            for request in filter(None, map(self._waiting, [*self._lost])):
                answers.append(self._fail(request, self._lost.pop(request.episode)))
            for worker in self._workers:
                answers += self._serve(worker)
            now = time.monotonic()
            if answers or now >= until:
                return answers
            self._wait(min(until, *(worker.deadline for worker in self._workers)) - now)

    def _waiting(self, episode: int) -> _EnvRequest | None:
        waiting = self._worker_of[episode].waiting
        return next((one for one in waiting if one.episode == episode and one.expected is None), None)

    def _wait(self, seconds: float) -> None:
        poll = select.poll()
        for worker in self._workers:
            if worker.process is not None:
                poll.register(worker.fds[1], select.POLLIN)
                if worker.events:
                    poll.register(worker.fds[0], worker.events)
        poll.poll(max(0.0, seconds) * 1000 + 1)

    def _serve(self, worker: _EnvWorker) -> list[EnvAnswer]:
        if worker.process is None:
            if not worker.waiting:
                return []
            worker.spawn()
        answers = list[EnvAnswer]()
        try:
            for message in worker.receive():
                answers += self._received(worker, message)
            worker.send()
        except EOFError:
            return answers + self._ended(worker, DIED, "")
        except (ValueError, LookupError, TypeError, RecursionError) as error:
            return answers + self._ended(
                worker, DIED, f"the environment's process sent an invalid reply: {error!r:.200}"
            )
        if time.monotonic() > worker.deadline:
            answers += self._ended(worker, TIMEOUT, f"no answer after {self.options.timeout:g} s (env.timeout)")
        return answers

    def _received(self, worker: _EnvWorker, message: Json) -> list[EnvAnswer]:
        if "fatal" in message:
            self.close()
            raise UserError(f"env.cls={self.options.cls} cannot be loaded: {message['fatal']}")
        if "ready" in message:
            worker.capacity, worker.n_starts = self.options.max_concurrency if message["asynchronous"] else 1, 0
            return []
        request = worker.running[message["id"]]
        if "error" not in message and request.op != "close":
            turn_of(message["turn"])  # an invalid one ends the process
        del worker.running[request.number]
        if request.op == "close" or request.episode not in worker.history:
            return []
        if request.expected is None and request.episode in self._lost:
            return [self._fail(request, self._lost.pop(request.episode))]
        if "error" in message:
            failure = EnvFailure(ERROR, message["error"], message.get("traceback", ""))
            return self._failed(request, failure)
        turn, history = message["turn"], worker.history[request.episode]
        if request.expected is None:
            history.append((request, turn))
            del worker.deaths[request.episode]
            return [EnvAnswer(request.episode, turn_of(turn), time.monotonic() - request.started, request.op)]
        if turn != request.expected:
            detail = "another environment ended their process, and this one is not deterministic: it cannot be replayed"
            self._lost[request.episode] = EnvFailure(DIED, detail)
        return []

    def _failed(self, request: _EnvRequest, failure: EnvFailure) -> list[EnvAnswer]:
        """Fail an episode now, or if a request was played again, at its next request: the caller expects no answer."""
        if request.expected is None:
            return [self._fail(request, failure)]
        worker = self._worker_of[request.episode]
        worker.waiting = deque(one for one in worker.waiting if one.episode != request.episode or one.expected is None)
        self._lost[request.episode] = failure
        return []

    def _fail(self, request: _EnvRequest, failure: EnvFailure) -> EnvAnswer:
        episode = request.episode
        self._failed_requests[episode] = self.history(episode), request
        worker = self._worker_of.pop(episode)
        worker.history.pop(episode)
        worker.waiting = deque(one for one in worker.waiting if one.episode != episode)
        return EnvAnswer(episode, failure)

    def _ended(self, worker: _EnvWorker, kind: str, detail: str) -> list[EnvAnswer]:
        """Kill a process; fail the request at fault, and play the other episodes again."""
        was_ready = worker.capacity > 0
        how = worker.kill()
        if not was_ready:
            worker.n_starts += 1
            if kind == DIED and not how.startswith("exit") and worker.n_starts < MAX_DEATHS:
                worker.spawn()  # it was killed by a signal
                return []
            self.close()
            waited = f"was not ready after {STARTUP_S:g} s" if kind == TIMEOUT else f"ended ({how})"
            raise UserError(f"env.cls={self.options.cls}: its process {waited}")
        late = [one for one in worker.running.values() if time.monotonic() > one.started + self.options.timeout]
        suspects = late if kind == TIMEOUT else list(worker.running.values())
        answers = list[EnvAnswer]()
        failure = EnvFailure(kind, detail or f"the environment's process ended ({how})")
        for one in suspects:
            worker.deaths[one.episode] += 1 if len(suspects) == 1 else 0
            is_at_fault = kind == TIMEOUT or worker.deaths[one.episode] >= MAX_DEATHS
            if is_at_fault and one.episode in worker.history:
                answers += self._failed(one, failure)
        worker.serial |= len(suspects) > 1
        again = [one for one in worker.running.values() if one.episode in worker.history and one.expected is None]
        waiting = [one for one in (*again, *worker.waiting) if one.op != "close" and one.expected is None]
        worker.running.clear()
        worker.waiting = deque(self._replays(worker))
        worker.waiting += waiting
        if worker.waiting:
            worker.spawn()
        return answers

    def _replays(self, worker: _EnvWorker) -> Iterator[_EnvRequest]:
        for episode, history in worker.history.items():
            for request, turn in history if episode not in self._lost else ():
                self._number += 1
                yield _EnvRequest(self._number, request.episode, request.op, request.fields, turn)

    def close(self) -> None:
        """Kill all processes and their descendants."""
        for worker in self._workers:
            worker.kill()
