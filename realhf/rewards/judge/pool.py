"""Judges responses in child processes, with a deadline per response; a process that hangs is killed and replaced."""

import contextlib
import json
import math
import os
import select
import signal
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from subprocess import PIPE, Popen
from typing import Protocol

from realhf.api.config import RewardConfig
from realhf.base.errors import UserError
from realhf.rewards.group.presets import check_group_fn
from realhf.rewards.registry import FORMAT, VERIFIERS, check_fn, is_remote
from realhf.rewards.verdict import Item, ResponseGroup, Status, Verdict

EVENT_LOOP_GRACE_S = 1.0  # an event loop is stuck this long after a response's own deadline, which the child enforces


class Judge(Protocol):
    """Judges responses; ``self_test`` waits until it is ready and runs the built-in tests, if any."""

    def spawn(self) -> None: ...

    def self_test(self) -> None: ...

    def judge(self, items: Sequence[Item]) -> list[Verdict]: ...

    def close(self) -> None: ...


def open_judge(fn: str, config: RewardConfig) -> Judge:
    """Return the judge for a ``reward.fn`` without starting it; UserError for an invalid ``fn``."""
    if not is_remote(fn):
        return JudgePool(fn, config.timeout, config.processes, max_concurrency=config.max_concurrency,
                         test_timeout=config.test_timeout)  # fmt: skip
    from realhf.rewards.judge.remote import RemoteJudge

    token = os.environ.get(config.token_env, "") if config.token_env else ""
    return RemoteJudge(fn, config.timeout, config.processes, config.retries, token)


def judge_once(judges: Sequence[Judge], items: Sequence[Item]) -> list[list[Verdict]]:
    """Return each judge's verdicts on all items, in order; equal items are judged once."""
    keys = [(prompt, response, json.dumps(row, sort_keys=True)) for prompt, response, row in items]
    distinct = dict(zip(keys, items, strict=True))
    results = [dict(zip(distinct, judge.judge(list(distinct.values())), strict=True)) for judge in judges]
    return [[verdicts[key] for key in keys] for verdicts in results]


class JudgePool:
    """``processes`` children that judge with ``fn`` (not a URL), started by ``spawn`` or on first use.

    ``is_group_wise``: ``fn`` is a ``reward.group_fn``, which judges all responses to a prompt.

    UserError for an invalid ``fn``, or a child that is not ready within ``startup_timeout`` seconds.
    """

    def __init__(
        self,
        fn: str,
        timeout: float,
        processes: int = 1,
        startup_timeout: float = 60.0,
        max_concurrency: int = 16,
        test_timeout: float = math.inf,
        is_group_wise: bool = False,
    ) -> None:
        if timeout <= 0 or processes < 1 or max_concurrency < 1:
            raise UserError(
                f"reward.timeout={timeout}, processes={processes}, max_concurrency={max_concurrency} must be positive"
            )
        if problems := check_group_fn(fn) if is_group_wise else check_fn(fn):
            raise UserError(problems)
        option = "reward.group_fn" if is_group_wise else "reward.fn"
        path, colon, name = fn.rpartition(":")
        self._fn = f"{os.path.abspath(path)}:{name}" if colon and not fn.startswith(FORMAT) else fn
        self._max_concurrency = max_concurrency
        self.children = [
            JudgeProcess(self._fn, timeout, test_timeout, startup_timeout, option) for _ in range(processes)
        ]

    def spawn(self) -> None:
        """Start all children that do not run, without waiting until they are ready."""
        for child in self.children:
            child.spawn()

    def start(self) -> None:
        """Start all children in parallel and wait until they are ready."""
        self.spawn()
        for child in self.children:
            child.await_ready()

    def judge(self, items: Sequence[Item]) -> list[Verdict]:
        """Return the verdicts on the items, in order."""
        return self._judge_all([{"prompt": prompt, "answer": answer, "row": row} for prompt, answer, row in items])

    def judge_groups(self, groups: Sequence[ResponseGroup]) -> list[Verdict]:
        """Return the verdict on each group, with ``scores``, in order; ``fn`` is a ``reward.group_fn``."""
        return self._judge_all([{"prompt": g.prompt, "responses": g.responses, "row": g.row} for g in groups])

    def _judge_all(self, requests: Sequence[dict]) -> list[Verdict]:
        pending = deque(enumerate(requests))
        verdicts: dict[int, Verdict] = {}

        def taken() -> Iterator[tuple[int, dict]]:
            with contextlib.suppress(IndexError):  # another thread took the last one
                while pending:
                    yield pending.popleft()

        def work(child: JudgeProcess) -> None:
            verdicts.update(child.judge_all(taken(), self._max_concurrency))

        with ThreadPoolExecutor(len(self.children)) as threads:
            futures = [threads.submit(work, child) for child in self.children[: len(requests)]]
            try:
                wait(futures, return_when=FIRST_EXCEPTION)
            finally:
                pending.clear()  # after an error, the other threads finish their current response
        for future in futures:
            future.result()
        return [verdicts[i] for i in range(len(requests))]

    def self_test(self) -> None:
        """Start the children and run the self-test of a built-in verifier; UserError for an unexpected verdict."""
        self.start()
        tests = VERIFIERS[self._fn].self_test if self._fn in VERIFIERS else ()
        verdicts = self.judge([("", response, row) for response, row, _ in tests])
        problems = [
            f"self-test of reward.fn={self._fn} failed: {response!r} for {row!r} scored {v.score} instead of {score}"
            f" ({v.status.value} {v.detail})"
            for v, (response, row, score) in zip(verdicts, tests, strict=True)
            if v.status is not Status.ok or v.score != score
        ]
        if problems:
            raise UserError(problems)

    def close(self) -> None:
        """Kill all children and their descendants."""
        for child in self.children:
            child.kill()


class JudgeProcess:
    """A `realhf.rewards.judge.server`, started on demand and replaced when it hangs or dies; not thread-safe."""

    def __init__(self, fn: str, timeout: float, test_timeout: float, startup_timeout: float, option: str) -> None:
        self._fn, self._timeout, self._test_timeout = fn, timeout, test_timeout
        self._startup_timeout, self._option = startup_timeout, option
        self._process: Popen[bytes] | None = None
        self._is_async: bool | None = None  # None until the process is ready
        self._received = b""

    def spawn(self) -> None:
        """Start the process if there is none, without waiting until it is ready."""
        if self._process is not None:
            return
        limits = [str(self._timeout), str(self._test_timeout)]
        command = [sys.executable, "-m", "realhf.rewards.judge.server", self._fn, *limits]
        self._process = Popen(command, stdin=PIPE, stdout=PIPE, bufsize=0, start_new_session=True)
        for fd in self._fds():
            os.set_blocking(fd, False)

    def _fds(self) -> tuple[int, int]:
        assert self._process is not None and self._process.stdin is not None and self._process.stdout is not None
        return self._process.stdin.fileno(), self._process.stdout.fileno()

    def await_ready(self) -> None:
        """Wait until the process has loaded its function; UserError if it cannot, or not in time."""
        self.spawn()
        if self._is_async is not None:
            return
        try:
            reply = self._receive(time.monotonic() + self._startup_timeout)
        except TimeoutError:
            waited = f"{self._startup_timeout:g} s; does the file do heavy work when it is imported?"
            problem = f": the judge process was not ready after {waited}"
        except EOFError:
            problem = f": the judge process ended during startup ({self._reap()})"
        else:
            problem = f" cannot be loaded: {reply['fatal']}" if "fatal" in reply else ""
        if problem:
            self.kill()
            raise UserError(f"{self._option}={self._fn!r}{problem}")
        self._is_async = bool(reply.get("asynchronous"))

    def judge_all(self, requests: Iterator[tuple[int, dict]], max_concurrency: int) -> Iterator[tuple[int, Verdict]]:
        """Yield the verdict on each numbered request as it arrives.

        A synchronous function gets one request at a time, an asynchronous one up to ``max_concurrency``. When its
        process dies or its event loop is stuck, the requests in progress are judged again one at a time, so that only
        the one at fault fails.
        """
        self.await_ready()
        if not self._is_async:
            yield from ((i, self._judge(request)) for i, request in requests)
            return
        in_progress: dict[int, tuple[dict, float]] = {}
        while True:
            try:
                while len(in_progress) < max_concurrency and (new := next(requests, None)) is not None:
                    i, request = new
                    deadline = time.monotonic() + self._timeout + EVENT_LOOP_GRACE_S
                    in_progress[i] = request, deadline
                    self._send({**request, "id": i}, deadline)
                if not in_progress:
                    return
                reply = self._receive(min(deadline for _, deadline in in_progress.values()))
            except (TimeoutError, EOFError):
                self.kill()
                for i, (request, _) in in_progress.items():
                    yield i, self._judge(request)
                in_progress.clear()
            else:
                i = reply["id"]
                del in_progress[i]
                yield i, self._verdict_of(reply)

    def _judge(self, request: dict) -> Verdict:
        self.await_ready()
        deadline = time.monotonic() + self._timeout
        try:
            self._send(request, deadline)
            return self._verdict_of(self._receive(deadline))
        except TimeoutError:
            self.kill()
            verdict = self._verdict_of({"timeout": True})
        except EOFError:
            verdict = Verdict(0.0, Status.error, f"the judge process ended ({self._reap()})")
        self.spawn()
        return verdict

    def _verdict_of(self, reply: dict) -> Verdict:
        if "timeout" in reply:
            return Verdict(0.0, Status.timeout, f"no verdict after {self._timeout:g} s (reward.timeout)")
        if "error" in reply:
            return Verdict(0.0, Status.error, str(reply["error"]), str(reply.get("traceback", "")))
        if "scores" in reply:
            return Verdict(0.0, Status.ok, scores=tuple(reply["scores"]))
        return Verdict(float(reply["score"]), Status.ok, str(reply.get("reason", "")))

    def kill(self) -> None:
        """Kill the process and its process group, if it is running."""
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # not reaped yet, so the group id is not reused
        for stream in filter(None, (process.stdin, process.stdout)):
            stream.close()
        process.wait()
        self._is_async, self._received = None, b""

    def _reap(self) -> str:
        """Clean up after a process that closed its streams, and return how it ended."""
        assert self._process is not None
        pid = self._process.pid
        for _ in range(50):  # the streams close shortly before the process ends
            if (end := os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
                break
            time.sleep(0.01)
        self.kill()
        if end is None:
            return "it closed its streams"
        return f"exit code {end.si_status}" if end.si_code == os.CLD_EXITED else str(signal.strsignal(end.si_status))

    def _send(self, request: dict, deadline: float) -> None:
        """Write a request; TimeoutError at ``deadline`` (monotonic seconds), EOFError for a broken pipe."""
        fd, _ = self._fds()
        data = json.dumps(request).encode() + b"\n"
        while data:
            poll_until(fd, select.POLLOUT, deadline)
            try:
                data = data[os.write(fd, data) :]
            except BlockingIOError:
                continue
            except BrokenPipeError:
                raise EOFError from None

    def _receive(self, deadline: float) -> dict:
        """Return the next reply; TimeoutError at ``deadline`` (monotonic seconds), EOFError at end of file."""
        _, fd = self._fds()
        while b"\n" not in self._received:
            poll_until(fd, select.POLLIN, deadline)
            chunk = os.read(fd, 65536)
            if not chunk:
                raise EOFError
            self._received += chunk
        line, _, self._received = self._received.partition(b"\n")
        return json.loads(line)


def poll_until(fd: int, event: int, deadline: float) -> None:
    """Wait until ``fd`` is ready for ``event``; TimeoutError at ``deadline`` (monotonic seconds)."""
    poll = select.poll()
    poll.register(fd, event)
    if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
        raise TimeoutError
