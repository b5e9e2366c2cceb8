"""Runs untrusted Python programs, each in an isolated process with resource limits and a deadline.

A program cannot influence its verdict: outputs are read through pipes and compared outside, the kernel reports how it
ended, and the process it is forked from (`fork_server`) holds no data. `isolation` defines the restrictions. A program
may start threads, but no process, and may not open sockets.
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
import sys
import time
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from subprocess import DEVNULL, Popen, TimeoutExpired

from realhf.base.errors import UserError
from realhf.base.isolation.restrict import Limits

BOOT = """
import sys
sys.path.insert(0, sys.argv[1])
from realhf.rewards.sandbox.fork_server import main
del sys.path[0]
main(int(sys.argv[2]), sys.argv[3] == "1")
"""
ENVIRONMENT = {"PATH": "/usr/local/bin:/usr/bin:/bin", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
STARTUP_S, KILL_S = 60.0, 10.0  # for the server to start, for a killed program to exit
STDERR_TAIL = 4096  # bytes
CHUNK = 65536


class Reason(Enum):
    """Why a program ended, or why it was rejected."""

    ok = "ok"
    wrong = "wrong"  # it ran with an output that is not the expected one
    no_program = "no_program"  # the response contains none
    error = "error"  # an exception, or a non-zero exit code
    timeout = "timeout"
    memory = "memory"
    output = "output"  # above the limit
    forbidden = "forbidden"  # ended by a denied operation
    killed = "killed"  # by a signal from elsewhere


@dataclass(frozen=True)
class ProgramResult:
    """How a program ended; ``detail`` describes a failure."""

    reason: Reason
    stdout: str = ""
    detail: str = ""


class ProgramStopped(Exception):
    """A program ended, or was stopped, before it wrote a reply."""

    def __init__(self, result: ProgramResult) -> None:
        super().__init__(result.detail or result.reason.value)
        self.result = result


class Sandbox:
    """Runs untrusted programs through a fork server that is started on first use and replaced when it dies.

    With ``namespaces=False`` it does not use them even if the kernel has them.
    """

    def __init__(self, limits: Limits | None = None, namespaces: bool = True) -> None:
        self._limits = limits or Limits()
        self._namespaces = namespaces
        self._server: Popen[bytes] | None = None
        self._requests: socket.socket | None = None
        self.description = ""

    def open(self) -> None:
        """Start the server unless it is running; UserError if this machine cannot isolate programs."""
        if self._server is not None:
            return
        self._requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        root, fd = str(Path(__file__).parents[3]), theirs.fileno()
        command = [sys.executable, "-I", "-X", "utf8", "-c", BOOT, root, str(fd), str(int(self._namespaces))]
        with theirs:
            self._server = Popen(  # in its own session it outlives a kill of the judge's group and cleans up
                command, stdin=DEVNULL, stdout=DEVNULL, pass_fds=(fd,), env=ENVIRONMENT, cwd="/", start_new_session=True
            )
        self._requests.settimeout(STARTUP_S)
        try:
            reply = json.loads(self._requests.recv(CHUNK) or b'{"fatal": "its server ended during startup"}')
        except TimeoutError:
            reply = {"fatal": f"its server was not ready after {STARTUP_S:g} s"}
        if "ready" in reply and (first := self.run("")).reason is not Reason.ok:
            reply = {"fatal": first.detail}
        if "fatal" in reply:
            self.close()
            raise UserError(f"the sandbox cannot be used here: {reply['fatal']}")
        self.description = reply["ready"]

    def close(self) -> None:
        server, self._server = self._server, None
        if server is not None and self._requests is not None:
            self._requests.close()  # makes the server exit
            try:
                server.wait(KILL_S)
            except TimeoutExpired:
                server.kill()
                server.wait()

    def start(self, source: str, seconds: float) -> "Program":
        """Start a program with about ``seconds`` of CPU time; the caller closes it."""
        self.open()
        try:
            return self._start(source, seconds)
        except OSError:  # the server has died, for example out of memory
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
            (stdin, stdin_w), (stdout_r, stdout), (stderr_r, stderr) = (os.pipe() for _ in range(3))
            try:
                fds = [theirs.fileno(), file.fileno(), stdin, stdout, stderr]
                socket.send_fds(self._requests, [json.dumps(message).encode()], fds)
            except OSError:
                for fd in (stdin_w, stdout_r, stderr_r):
                    os.close(fd)
                ours.close()
                raise
            finally:
                for fd in (stdin, stdout, stderr):
                    os.close(fd)
        return Program(ours, (stdin_w, stdout_r, stderr_r), self._limits.output)

    def run(self, source: str, stdin: str = "", seconds: float = 6.0) -> ProgramResult:
        """Run a script with the text ``stdin`` for at most ``seconds``; return its output and how it ended."""
        with contextlib.closing(self.start(source, seconds)) as program:
            return program.finish(stdin.encode(errors="surrogatepass"), seconds)


def describe_sandbox() -> str:
    """Return a description of the isolation on this machine, or why programs cannot run."""
    try:
        with contextlib.closing(Sandbox()) as sandbox:
            sandbox.open()
            return sandbox.description
    except UserError as error:
        return str(error)


class Program:
    """A running program: the parent's ends of its control socket and of its stdin, stdout and stderr."""

    def __init__(self, control: socket.socket, streams: tuple[int, int, int], output_limit: int) -> None:
        self._control, self._output_limit = control, output_limit
        self._stdin: int | None
        self._stdin, self._stdout, self._stderr = streams
        self._unsent = memoryview(b"")
        self._received, self._errors, self._n_errors = b"", b"", 0
        self._close_after_send = False
        self._status: int | None = None
        self._poll = select.poll()
        for fd in streams:
            os.set_blocking(fd, False)
        for fd in (self._stdout, self._stderr, control.fileno()):
            self._poll.register(fd, select.POLLIN)

    def ask(self, line: bytes, seconds: float) -> bytes:
        """Send a line and return the next line of output; ProgramStopped if there is none in time."""
        self._send(line + b"\n")
        limit = self._read_output(time.monotonic() + seconds, for_line=True)
        if limit is not None or b"\n" not in self._received:
            result = self._result(limit, seconds)
            no_reply = ProgramResult(Reason.error, result.stdout, "it ended without a reply")
            raise ProgramStopped(no_reply if result.reason is Reason.ok else result)
        reply, _, self._received = self._received.partition(b"\n")
        return reply

    def finish(self, stdin: bytes, seconds: float) -> ProgramResult:
        """Send the rest of the input and wait at most ``seconds`` until the program ends."""
        self._close_after_send = True
        self._send(stdin)
        return self._result(self._read_output(time.monotonic() + seconds, for_line=False), seconds)

    def close(self) -> None:
        """Kill the program unless it has ended, and wait until it has exited."""
        with contextlib.suppress(OSError):  # the server and its programs have already exited
            if self._status is None:
                self._control.send(b"kill")
                self._control.settimeout(KILL_S)
                self._control.recv(16)
        self._control.close()
        self._close_input()
        os.close(self._stdout)
        os.close(self._stderr)

    def _send(self, data: bytes) -> None:
        self._unsent = memoryview(bytes(self._unsent) + data)
        if self._stdin is not None:
            self._poll.register(self._stdin, select.POLLOUT)

    def _read_output(self, deadline: float, for_line: bool) -> Reason | None:
        """Read until the program has ended, or there is a line; return the limit that it reached, if any."""
        while self._status is None and not (for_line and b"\n" in self._received):
            left = deadline - time.monotonic()
            if left <= 0:
                return Reason.timeout
            for fd, _ in self._poll.poll(left * 1000 + 1):
                if fd == self._stdin:
                    self._write(fd)
                elif fd == self._control.fileno():
                    reply = self._control.recv(16)
                    self._status = struct.unpack("i", reply)[0] if reply else signal.SIGKILL
                else:
                    self._read(fd)
            if self._over_limit():
                return Reason.output
        if self._status is not None:  # read the rest
            for fd in (self._stdout, self._stderr):
                while self._read(fd) and not self._over_limit():
                    pass
        return Reason.output if self._over_limit() else None

    def _over_limit(self) -> bool:
        return max(len(self._received), self._n_errors) > self._output_limit

    def _read(self, fd: int) -> bool:
        """Read available bytes; return False if there are none."""
        try:
            chunk = os.read(fd, CHUNK)
        except BlockingIOError:
            return False
        if not chunk:
            with contextlib.suppress(KeyError):
                self._poll.unregister(fd)
        elif fd == self._stdout:
            self._received += chunk
        else:
            self._errors = (self._errors + chunk)[-STDERR_TAIL:]
            self._n_errors += len(chunk)
        return bool(chunk)

    def _write(self, fd: int) -> None:
        try:
            self._unsent = self._unsent[os.write(fd, self._unsent) :]
        except BlockingIOError:
            return
        except BrokenPipeError:
            self._unsent = memoryview(b"")  # the program has closed its stdin
        if not self._unsent:
            self._poll.unregister(fd)
            if self._close_after_send:
                self._close_input()

    def _close_input(self) -> None:
        if self._stdin is not None:
            os.close(self._stdin)
            self._stdin = None

    def _result(self, limit: Reason | None, seconds: float) -> ProgramResult:
        stdout = self._received[: self._output_limit].decode(errors="replace")
        if limit is Reason.timeout:
            return ProgramResult(limit, stdout, f"not done after {seconds:.3g} s")
        if limit is Reason.output:
            return ProgramResult(limit, stdout, f"more than {self._output_limit} bytes of output")
        assert self._status is not None
        reason, detail = how_it_ended(self._status, self._errors.decode(errors="replace"))
        return ProgramResult(reason, stdout, detail)


def how_it_ended(status: int, errors: str) -> tuple[Reason, str]:
    """Return the reason and detail for an exit status and the tail of stderr."""
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
