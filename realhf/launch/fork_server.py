"""A fork server of workers on this machine: it imports their modules once, while the run is still being checked.

A request on its socket carries the arguments of a worker and the descriptors of its standard input and its log. The
server replies with the process id, and again with the exit status. Where it cannot serve, workers are started as
programs: without setproctitle, or with more than one thread, which a fork would lose.
"""

import contextlib
import gc
import importlib
import importlib.util
import json
import os
import platform
import select
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import IO, Any

from realhf.base.process import raise_fd_limit

MESSAGE_BYTES = 1 << 16
FORK_S = 120.0
"""Time for the imports and the fork of the first worker."""
NUMPY_THREADS = {"OPENBLAS_NUM_THREADS": "1"} if platform.machine() == "x86_64" else {}
"""numpy's threads would start at its import. On other machines torch uses them too."""
STATUS_S = 5.0
"""Time for the exit status of a worker that has ended."""
UNKNOWN_STATUS = 255
"""Exit code of a worker that ended after its fork server."""


class ForkServer:
    """Starts at once, without waiting for its imports. ``environment`` is that of all workers."""

    def __init__(self, module: str, environment: Mapping[str, str]) -> None:
        """``module`` has ``preload()``, called once, and ``run(arguments)``, called in every forked process."""
        self.environment = dict(environment)
        self.workers: dict[int, ForkedProcess] = {}
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        added = NUMPY_THREADS.keys() - self.environment.keys()
        command = [sys.executable, "-m", __name__, module, str(theirs.fileno()), *added]
        with theirs:
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                                             stderr=subprocess.DEVNULL, pass_fds=[theirs.fileno()],
                                             env=NUMPY_THREADS | self.environment, start_new_session=True)  # fmt: skip

    def fork(self, arguments: Sequence[str], log: IO[bytes]) -> "ForkedProcess | None":
        """Start a worker in a new session, with a pipe from this process as its input; None if the server has ended."""
        reader, writer = os.pipe()
        deadline, pid = time.monotonic() + FORK_S, None
        with contextlib.suppress(OSError):  # the server has ended
            socket.send_fds(self._socket, [json.dumps(arguments).encode()], [reader, log.fileno()])
            while (reply := self.receive(deadline)) and (pid := reply.get("forked")) is None:
                pass
        os.close(reader)
        if pid is None:
            os.close(writer)
            self.close()  # a late reply would be taken for the next one
            return None
        self.workers[pid] = ForkedProcess(self, pid, writer)
        return self.workers[pid]

    def receive(self, deadline: float) -> dict[str, int]:
        """Return the next reply, after setting the exit code it may have; empty if there is none by the deadline."""
        if self._socket.fileno() < 0 or not readable(self._socket.fileno(), deadline - time.monotonic()):
            return {}
        reply: dict[str, int] = json.loads(self._socket.recv(MESSAGE_BYTES) or "{}")
        if worker := self.workers.get(reply.get("ended", 0)):
            worker.returncode = reply["status"]
        return reply

    def close(self) -> None:
        """End the server; its workers go on until their input ends."""
        self._socket.close()
        self._process.kill()
        self._process.wait()


class ForkedProcess:
    """A worker of a fork server, with the methods of ``Popen`` that launchers use."""

    def __init__(self, server: ForkServer, pid: int, stdin: int) -> None:
        self.pid, self.stdin = pid, os.fdopen(stdin, "wb", buffering=0)
        self.returncode: int | None = None
        self._server = server
        self._pidfd: int | None = None
        with contextlib.suppress(ProcessLookupError):  # it has ended already
            self._pidfd = os.pidfd_open(pid)

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal; None while the process runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float) -> int:
        """Wait for the end; raises ``subprocess.TimeoutExpired``."""
        if self.returncode is None:
            if self._pidfd is not None:
                if not readable(self._pidfd, timeout):
                    raise subprocess.TimeoutExpired(f"worker process {self.pid}", timeout)
                os.close(self._pidfd)
                self._pidfd = None
            self.returncode = self._exit_code()
        return self.returncode

    def _exit_code(self) -> int:
        """Return the exit code of a process that has ended, as its parent reports it."""
        deadline = time.monotonic() + STATUS_S
        with contextlib.suppress(OSError):  # the server has ended too
            while self.returncode is None and self._server.receive(deadline):
                pass
        return UNKNOWN_STATUS if self.returncode is None else self.returncode


def readable(fd: int, timeout: float) -> bool:
    """Wait until a descriptor, of any number, can be read; False after the timeout."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(max(0.0, timeout) * 1e3))


_server: ContextVar[ForkServer | None] = ContextVar("fork server of workers", default=None)


@contextlib.contextmanager
def preloaded(module: str, environment: Mapping[str, str] | None) -> Iterator[None]:
    """Run a fork server for the workers started in this context, if they have this environment; None for no server."""
    server = None
    if environment is not None and importlib.util.find_spec("setproctitle") and hasattr(os, "pidfd_open"):
        server = ForkServer(module, environment)
    token = _server.set(server)
    try:
        yield
    finally:
        _server.reset(token)
        if server is not None:
            server.close()


def forked(arguments: Sequence[str], environment: Mapping[str, str], log: Path) -> ForkedProcess | None:
    """Fork a worker from the server of the context; None if there is none, or one with another environment."""
    server = _server.get()
    if server is None or server.environment != environment:
        return None
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as out:
        return server.fork(arguments, out)


def main(module: str, fd: int, *added: str) -> None:
    """Import the module and serve.

    ``added`` are environment variables of the server that workers and their children do not have.
    """
    if not preload(module):
        return
    for name in added:
        del os.environ[name]
    serve_module(module, fd)


def preload(module: str) -> bool:
    """Import a module whose functions forks will call; return False if it started threads, which a fork would lose."""
    import setproctitle

    setproctitle.getproctitle()  # finds the memory of the command line, which needs the original environment
    worker: Any = importlib.import_module(module)
    worker.preload()
    raise_fd_limit()  # as launchers do later
    if len(os.listdir("/proc/self/task")) > 1:
        return False
    gc.collect()
    gc.freeze()  # so that forks share these pages
    return True


def serve_module(module: str, fd: int) -> None:
    """Serve until the launcher closes the socket; in a forked process, run the worker of an imported module."""
    import setproctitle

    if (arguments := serve(socket.socket(fileno=fd))) is not None:
        sys.argv = [module, *arguments]
        title = " ".join([sys.executable, "-m", module, *arguments])
        setproctitle.setproctitle(title.encode(errors="replace").decode())
        sys.modules[module].run(arguments)


def serve(requests: socket.socket) -> list[str] | None:
    """Fork a process per request; return its arguments in the forked process, and None once the launcher hangs up."""
    poll = select.poll()
    poll.register(requests, select.POLLIN)
    pids: dict[int, int] = {}  # by pidfd, which is readable once the process has ended
    while True:
        for fd, _ in poll.poll():
            if fd != requests.fileno():
                poll.unregister(fd)
                os.close(fd)
                pid, status = os.waitpid(pids.pop(fd), 0)
                reply = {"ended": pid, "status": os.waitstatus_to_exitcode(status)}
            else:
                message, fds, _, _ = socket.recv_fds(requests, MESSAGE_BYTES, 2)
                if not message:
                    return None
                if (pid := os.fork()) == 0:
                    _detach(*fds, requests.detach(), *pids)
                    return list(json.loads(message))
                for received in fds:
                    os.close(received)
                pidfd = os.pidfd_open(pid)
                pids[pidfd] = pid
                poll.register(pidfd, select.POLLIN)
                reply = {"forked": pid}
            with contextlib.suppress(BrokenPipeError):  # the launcher has ended; its next event says so
                requests.send(json.dumps(reply).encode())


def _detach(stdin: int, log: int, *unused: int) -> None:
    """Give a forked process its own session and streams, and close the server's descriptors."""
    os.setsid()
    for source, target in ((stdin, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    for fd in (stdin, log, *unused):
        os.close(fd)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), *sys.argv[3:])
