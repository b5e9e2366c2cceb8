"""Runs untrusted Python programs: each in a process of its own that is shut off, limited, and killed at its deadline.

The program cannot reach what judges it: outputs are read through pipes and compared elsewhere, how it ended is told by
the kernel, and the server that it was forked from (`warm`) holds nothing but a warm interpreter. What keeps it in is
in `confine`. A program is one process: it has threads, but starts no other process and opens no socket.
"""

import contextlib
import dataclasses
import errno
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import time
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from types import TracebackType

from realhf.base.errors import UserError
from realhf.rewards.sandbox.isolation import Limits

BOOT = """
import sys
sys.path.insert(0, sys.argv[1])
from realhf.rewards.sandbox.fork_server import main
del sys.path[0]
main(int(sys.argv[2]), sys.argv[3] == "1")
"""
ENVIRONMENT = {"PATH": "/usr/local/bin:/usr/bin:/bin", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
STARTUP, GRACE = 60.0, 10.0  # seconds: for the server to come up, for a killed program to be gone
ERRORS_KEPT = 4096  # bytes of the end of stderr
CHUNK = 65536


class Reason(Enum):
    """How a program, or the verdict on it, came about."""

    ok = "ok"
    wrong = "wrong"  # it ran, and its output is not the wanted one
    no_program = "no_program"  # the answer holds none
    error = "error"  # an exception, or an exit code
    timeout = "timeout"
    memory = "memory"
    output = "output"  # more of it than allowed
    forbidden = "forbidden"  # it was refused something, and ended over it
    killed = "killed"  # by a signal that we did not send


@dataclass(frozen=True)
class ProgramResult:
    """How a program ended; ``detail`` says more where it did not end well."""

    reason: Reason
    stdout: str = ""
    detail: str = ""


class ServerExited(Exception):
    """A program that was asked something did not live to answer."""

    def __init__(self, outcome: ProgramResult) -> None:
        super().__init__(outcome.detail or outcome.reason.value)
        self.outcome = outcome


class Sandbox:
    """A server for untrusted programs, started on first use and replaced when it dies.

    With ``namespaces=False`` it does without them even where the kernel has them.
    """

    def __init__(self, limits: Limits | None = None, namespaces: bool = True) -> None:
        self._limits = limits or Limits()
        self._namespaces = namespaces
        self._server: subprocess.Popen[bytes] | None = None
        self._requests: socket.socket | None = None
        self.description = ""

    def open(self) -> None:
        """Start the server unless it runs; UserError where programs cannot be shut in."""
        if self._server is not None:
            return
        self._requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        root, fd = str(Path(__file__).parents[3]), theirs.fileno()
        command = [sys.executable, "-I", "-X", "utf8", "-c", BOOT, root, str(fd), str(int(self._namespaces))]
        with theirs:
            self._server = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=(fd,),
                env=ENVIRONMENT,
                cwd="/",
                start_new_session=True,  # when the judge's group is killed, it still clears up
            )
        self._requests.settimeout(STARTUP)
        try:
            reply = json.loads(self._requests.recv(CHUNK) or b'{"fatal": "its server ended while it started"}')
        except TimeoutError:
            reply = {"fatal": f"its server was not ready after {STARTUP:g} s"}
        if "ready" in reply and (first := self.run("")).reason is not Reason.ok:
            reply = {"fatal": first.detail}
        if "fatal" in reply:
            self.close()
            raise UserError(f"the sandbox cannot be used here: {reply['fatal']}")
        self.description = reply["ready"]

    def close(self) -> None:
        """End the server and all its programs."""
        server, self._server = self._server, None
        if server is not None and self._requests is not None:
            self._requests.close()  # which it leaves over
            try:
                server.wait(GRACE)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()

    def start(self, source: str, seconds: float) -> "Program":
        """Start a program that may use ``seconds`` of CPU time, more or less; whoever does so closes it."""
        self.open()
        try:
            return self._start(source, seconds)
        except OSError:  # the server is gone, as when memory ran out
            self.close()
            self.open()
            return self._start(source, seconds)

    def _start(self, source: str, seconds: float) -> "Program":
        assert self._requests is not None
        message = {"limits": dataclasses.asdict(self._limits), "seconds": seconds}
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, open(os.memfd_create("source"), "wb") as file:
            file.write(source.encode(errors="surrogatepass"))
            file.seek(0)
            (stdin, to), (out, stdout), (err, stderr) = (os.pipe() for _ in range(3))
            try:
                fds = [theirs.fileno(), file.fileno(), stdin, stdout, stderr]
                socket.send_fds(self._requests, [json.dumps(message).encode()], fds)
            except OSError:
                for fd in (to, out, err):
                    os.close(fd)
                ours.close()
                raise
            finally:
                for fd in (stdin, stdout, stderr):
                    os.close(fd)
        return Program(ours, to, out, err, self._limits.output)

    def run(self, source: str, stdin: str = "", seconds: float = 6.0) -> ProgramResult:
        """Run a script with ``stdin``, for ``seconds`` at most, and return its output and how it ended."""
        with contextlib.closing(self.start(source, seconds)) as program:
            return program.finish(stdin.encode(errors="surrogatepass"), seconds)

    def __enter__(self) -> "Sandbox":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def describe_sandbox() -> str:
    """Return in words what keeps untrusted programs in on this machine, or why they cannot run."""
    try:
        with Sandbox() as sandbox:
            sandbox.open()
            return sandbox.description
    except UserError as error:
        return str(error)


class Program:
    """A running program, seen from outside."""

    def __init__(self, control: socket.socket, to: int, out: int, err: int, limit: int) -> None:
        self._control, self._out, self._err, self._limit = control, out, err, limit
        self._to: int | None = to
        self._unsent = memoryview(b"")
        self._received, self._errors, self._n_errors = b"", b"", 0
        self._last_input = False
        self._status: int | None = None
        self._poll = select.poll()
        for fd in (to, out, err):
            os.set_blocking(fd, False)
        for fd in (out, err, control.fileno()):
            self._poll.register(fd, select.POLLIN)

    def ask(self, line: bytes, seconds: float) -> bytes:
        """Send a line and return the line that the program writes next; Stopped when there is none in time."""
        self._send(line + b"\n")
        cut = self._listen(time.monotonic() + seconds, for_line=True)
        if cut is not None or b"\n" not in self._received:
            outcome = self._outcome(cut, seconds)
            silent = ProgramResult(Reason.error, outcome.stdout, "it ended without an answer")
            raise ServerExited(silent if outcome.reason is Reason.ok else outcome)
        reply, _, self._received = self._received.partition(b"\n")
        return reply

    def finish(self, stdin: bytes, seconds: float) -> ProgramResult:
        """Send the rest of the input and wait for the program's end, for ``seconds`` at most."""
        self._last_input = True
        self._send(stdin)
        return self._outcome(self._listen(time.monotonic() + seconds, for_line=False), seconds)

    def close(self) -> None:
        """Kill the program unless it has ended, and wait until it is gone."""
        with contextlib.suppress(OSError):  # a server that is gone took its programs along
            if self._status is None:
                self._control.send(b"kill")
                self._control.settimeout(GRACE)
                self._control.recv(16)
        self._control.close()
        self._close_input()
        os.close(self._out)
        os.close(self._err)

    def _send(self, data: bytes) -> None:
        self._unsent = memoryview(bytes(self._unsent) + data)
        if self._to is not None:
            self._poll.register(self._to, select.POLLOUT)

    def _listen(self, deadline: float, for_line: bool) -> Reason | None:
        """Read until the program has ended, or there is a line; return what cut it short."""
        while self._status is None and not (for_line and b"\n" in self._received):
            left = deadline - time.monotonic()
            if left <= 0:
                return Reason.timeout
            for fd, _ in self._poll.poll(left * 1000 + 1):
                if fd == self._to:
                    self._write(fd)
                elif fd == self._control.fileno():
                    said = self._control.recv(16)
                    self._status = struct.unpack("i", said)[0] if said else signal.SIGKILL
                else:
                    self._read(fd)
            if self._over_limit():
                return Reason.output
        if self._status is not None:  # nobody is left who could write
            for fd in (self._out, self._err):
                while self._read(fd) and not self._over_limit():
                    pass
        return Reason.output if self._over_limit() else None

    def _over_limit(self) -> bool:
        return len(self._received) > self._limit or self._n_errors > self._limit

    def _read(self, fd: int) -> bool:
        """Take in what is there; False when there is nothing."""
        try:
            chunk = os.read(fd, CHUNK)
        except BlockingIOError:
            return False
        if not chunk:
            with contextlib.suppress(KeyError):
                self._poll.unregister(fd)
        elif fd == self._out:
            self._received += chunk
        else:
            self._errors = (self._errors + chunk)[-ERRORS_KEPT:]
            self._n_errors += len(chunk)
        return bool(chunk)

    def _write(self, fd: int) -> None:
        try:
            self._unsent = self._unsent[os.write(fd, self._unsent) :]
        except BlockingIOError:
            return
        except BrokenPipeError:
            self._unsent = memoryview(b"")  # it does not want any
        if not self._unsent:
            self._poll.unregister(fd)
            if self._last_input:
                self._close_input()

    def _close_input(self) -> None:
        if self._to is not None:
            os.close(self._to)
            self._to = None

    def _outcome(self, cut: Reason | None, seconds: float) -> ProgramResult:
        stdout = self._received[: self._limit].decode(errors="replace")
        if cut is Reason.timeout:
            return ProgramResult(cut, stdout, f"not done after {seconds:.3g} s")
        if cut is Reason.output:
            return ProgramResult(cut, stdout, f"more than {self._limit} bytes of output")
        assert self._status is not None
        reason, detail = how_it_ended(self._status, self._errors.decode(errors="replace"))
        return ProgramResult(reason, stdout, detail)


def how_it_ended(status: int, errors: str) -> tuple[Reason, str]:
    """Return what an exit status and the end of stderr say."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        return Reason.timeout if number == signal.SIGXCPU else Reason.killed, signal.strsignal(number) or str(number)
    if (code := os.WEXITSTATUS(status)) == 0:
        return Reason.ok, ""
    lines = errors.strip().splitlines()
    detail = lines[-1][:500] if lines else f"exit code {code}"
    kind = detail.partition(":")[0]
    if kind.endswith("MemoryError"):
        return Reason.memory, detail
    if kind == "PermissionError" or detail.startswith(f"OSError: [Errno {errno.EROFS}]"):
        return Reason.forbidden, detail
    if any(detail.startswith(f"OSError: [Errno {number}]") for number in (errno.EFBIG, errno.ENOSPC)):
        return Reason.output, detail
    return Reason.error, detail
