"""One judge process as its parent sees it: start it, ask it with a deadline, kill it with all it started."""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time

from realhf.base.errors import UserError
from realhf.rewards.verdict import Status, Verdict


class ProcessExited(Exception):
    """The child closed its streams."""


class JudgeProcess:
    """A judge process that is started on demand and replaced when it hangs or dies. Used by one thread at a time."""

    def __init__(self, fn: str, timeout: float, startup_timeout: float) -> None:
        self._fn = fn
        self.timeout = timeout
        self._startup_timeout = startup_timeout
        self._process: subprocess.Popen[bytes] | None = None
        self.is_asynchronous = False  # known when the process is ready
        self._ready = False
        self._received = b""

    @property
    def running(self) -> bool:
        """Whether a process was started and not ended by us."""
        return self._process is not None

    def spawn(self) -> None:
        """Start the process unless there is one; it comes up by itself."""
        if self._process is not None:
            return
        command = [sys.executable, "-m", "realhf.rewards.judge.server", self._fn, str(self.timeout)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0, start_new_session=True
        )
        for fd in self._fds():
            os.set_blocking(fd, False)

    def _fds(self) -> tuple[int, int]:
        """File descriptors of the process's input and output."""
        assert self._process is not None and self._process.stdin is not None and self._process.stdout is not None
        return self._process.stdin.fileno(), self._process.stdout.fileno()

    def await_ready(self) -> None:
        """Wait until the process has loaded its function; UserError when it cannot, or not within the time."""
        self.spawn()
        if self._ready:
            return
        try:
            reply = self.receive(time.monotonic() + self._startup_timeout)
        except TimeoutError:
            self.kill()
            raise UserError(
                f"reward.fn={self._fn!r}: the judge process was not ready after {self._startup_timeout:g} s;"
                " does the file do heavy work when it is imported?"
            ) from None
        except ProcessExited:
            how = self._reap()
            raise UserError(f"reward.fn={self._fn!r}: the judge process ended while it started ({how})") from None
        if "fatal" in reply:
            self.kill()
            raise UserError(f"reward.fn={self._fn!r} cannot be loaded: {reply['fatal']}")
        self._ready, self.is_asynchronous = True, bool(reply.get("asynchronous"))

    def judge(self, request: dict) -> Verdict:
        """Return the verdict on one answer; a process that hangs or dies over it is replaced."""
        self.await_ready()
        deadline = time.monotonic() + self.timeout
        try:
            self.send(request, deadline)
            reply = self.receive(deadline)
        except TimeoutError:
            self.kill()
            self.spawn()
            return verdict_of({"timeout": True}, self.timeout)
        except ProcessExited:
            how = self._reap()
            self.spawn()
            return Verdict(0.0, Status.error, f"the judge process ended ({how})")
        return verdict_of(reply, self.timeout)

    def kill(self) -> None:
        """End the process and its whole group; harmless when there is none."""
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # not reaped yet, so the group is still ours
        for stream in filter(None, (process.stdin, process.stdout)):
            stream.close()
        process.wait()
        self._ready, self._received = False, b""

    def _reap(self) -> str:
        """Clear up after a process that closed its streams, and return how it ended."""
        assert self._process is not None
        pid = self._process.pid
        for _ in range(50):  # the streams close a moment before the process is gone
            if (end := os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
                break
            time.sleep(0.01)
        self.kill()
        if end is None:
            return "it closed its streams"
        return f"exit code {end.si_status}" if end.si_code == os.CLD_EXITED else str(signal.strsignal(end.si_status))

    def send(self, request: dict, deadline: float) -> None:
        """Write a request; TimeoutError at ``deadline`` (monotonic seconds), Gone where nobody reads."""
        fd, _ = self._fds()
        data = json.dumps(request).encode() + b"\n"
        while data:
            wait(fd, select.POLLOUT, deadline)
            try:
                data = data[os.write(fd, data) :]
            except BlockingIOError:
                continue
            except BrokenPipeError:
                raise ProcessExited from None

    def receive(self, deadline: float) -> dict:
        """Return the next reply; TimeoutError at ``deadline`` (monotonic seconds), Gone where nobody writes."""
        _, fd = self._fds()
        while b"\n" not in self._received:
            wait(fd, select.POLLIN, deadline)
            chunk = os.read(fd, 65536)
            if not chunk:
                raise ProcessExited
            self._received += chunk
        line, _, self._received = self._received.partition(b"\n")
        return json.loads(line)


def verdict_of(reply: dict, timeout: float) -> Verdict:
    """Return the verdict that a judge's reply stands for."""
    if "timeout" in reply:
        return Verdict(0.0, Status.timeout, f"no verdict after {timeout:g} s (reward.timeout)")
    if "error" in reply:
        return Verdict(0.0, Status.error, str(reply["error"]))
    return Verdict(float(reply["score"]), Status.ok, str(reply.get("reason", "")))


def wait(fd: int, event: int, deadline: float) -> None:
    """Wait until ``fd`` is ready for ``event``; TimeoutError at ``deadline`` (monotonic seconds)."""
    poll = select.poll()
    poll.register(fd, event)
    if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
        raise TimeoutError
