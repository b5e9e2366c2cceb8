"""Environments in child processes, with a deadline per request; a process that hangs is killed and replaced.

A process has the environments of many episodes. When it dies, they are played again in a new process, with the replies
that they have had; their turns must be the same. The request that it was executing fails at the second death.
"""

import json
import select
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from realhf.base.errors import UserError
from realhf.environments.env_process import STARTUP_S, EnvOptions, EnvProcess, EnvRequest, Json
from realhf.environments.types import Reply, Turn, reply_to_json, turn_of

MAX_DEATHS = 2
"""Deaths of a process at an episode's request, or before it is ready, that end the episode or the run."""
DIED, TIMEOUT, ERROR = "died", "timeout", "error"


@dataclass(frozen=True)
class EnvFailure:
    """Why an episode ended without a turn: ``kind`` is error, timeout or died."""

    kind: str
    detail: str
    traceback: str = ""


@dataclass(frozen=True)
class EnvAnswer:
    """The result of a request ``op``, which took the environment ``seconds``."""

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


class EnvPool:
    """``workers`` processes of environments of one class, started on first use; not thread-safe.

    An episode is a number, as from ``new_number``. It has at most one request at a time.
    """

    def __init__(self, options: EnvOptions) -> None:
        self.options = options
        self._workers = [EnvProcess(options) for _ in range(options.workers)]
        self._worker_of: dict[int, EnvProcess] = {}
        self._lost: dict[int, EnvFailure] = {}
        self._failed_requests: dict[int, tuple[list[PastRequest], EnvRequest]] = {}
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

    def _place(self, episode: int) -> EnvProcess:
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
            request = EnvRequest(self._number, episode, one.op, one.fields)
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
        self._worker_of[episode].waiting.append(EnvRequest(self._number, episode, op, fields))

    def end(self, episode: int) -> None:
        """Close an episode's environment, without waiting."""
        worker = self._worker_of.pop(episode, None)
        self._lost.pop(episode, None)
        self._failed_requests.pop(episode, None)
        if worker is not None and worker.history.pop(episode, None) is not None and worker.process is not None:
            self._number += 1
            worker.waiting.append(EnvRequest(self._number, episode, "close", {}))

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

    def _waiting(self, episode: int) -> EnvRequest | None:
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

    def _serve(self, worker: EnvProcess) -> list[EnvAnswer]:
        if worker.process is None:
            if not worker.waiting:
                return []
            worker.spawn()
        answers = list[EnvAnswer]()
        try:
            for message in worker.receive():
                answers += self._received(worker, message)
            if not worker.send():  # its last answers may have arrived since
                for message in worker.receive():
                    answers += self._received(worker, message)
                raise EOFError
        except EOFError:
            return answers + self._ended(worker, DIED, "")
        except (ValueError, LookupError, TypeError, RecursionError) as error:
            return answers + self._ended(
                worker, DIED, f"the environment's process sent an invalid reply: {error!r:.200}"
            )
        if time.monotonic() > worker.deadline:
            answers += self._ended(worker, TIMEOUT, f"no answer after {self.options.timeout:g} s (env.timeout)")
        return answers

    def _received(self, worker: EnvProcess, message: Json) -> list[EnvAnswer]:
        if "fatal" in message:
            self.close()
            raise UserError(f"env.cls={self.options.cls} cannot be loaded: {message['fatal']}")
        if "ready" in message:
            worker.set_ready(message["asynchronous"])
            return []
        request = worker.running[message["id"]]
        if "error" not in message and request.op != "close":
            turn_of(message["turn"])  # an invalid one ends the process
        worker.answered(request.number)
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
            return [EnvAnswer(request.episode, turn_of(turn), float(message["seconds"]), request.op)]
        if turn != request.expected:
            detail = "another environment ended their process, and this one is not deterministic: it cannot be replayed"
            self._lost[request.episode] = EnvFailure(DIED, detail)
        return []

    def _failed(self, request: EnvRequest, failure: EnvFailure) -> list[EnvAnswer]:
        """Fail an episode now, or if a request was played again, at its next request: the caller expects no answer."""
        if request.expected is None:
            return [self._fail(request, failure)]
        worker = self._worker_of[request.episode]
        worker.waiting = deque(one for one in worker.waiting if one.episode != request.episode or one.expected is None)
        self._lost[request.episode] = failure
        return []

    def _fail(self, request: EnvRequest, failure: EnvFailure) -> EnvAnswer:
        episode = request.episode
        self._failed_requests[episode] = self.history(episode), request
        worker = self._worker_of.pop(episode)
        worker.history.pop(episode)
        worker.waiting = deque(one for one in worker.waiting if one.episode != episode)
        return EnvAnswer(episode, failure)

    def _ended(self, worker: EnvProcess, kind: str, detail: str) -> list[EnvAnswer]:
        """Kill a process; fail the request at fault, and play the other episodes again."""
        was_ready = worker.is_ready
        how = worker.kill()
        if not was_ready:
            worker.n_starts += 1
            if kind == DIED and not how.startswith("exit") and worker.n_starts < MAX_DEATHS:
                worker.spawn()  # it was killed by a signal
                return []
            self.close()
            waited = f"was not ready after {STARTUP_S:g} s" if kind == TIMEOUT else f"ended ({how})"
            raise UserError(f"env.cls={self.options.cls}: its process {waited}")
        late = [one for one in worker.executing if time.monotonic() > one.started + self.options.timeout]
        suspects = late if kind == TIMEOUT else worker.executing
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

    def _replays(self, worker: EnvProcess) -> Iterator[EnvRequest]:
        for episode, history in worker.history.items():
            for request, turn in history if episode not in self._lost else ():
                self._number += 1
                yield EnvRequest(self._number, request.episode, request.op, request.fields, turn)

    def close(self) -> None:
        """Kill all processes and their descendants."""
        for worker in self._workers:
            worker.kill()
