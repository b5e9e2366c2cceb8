"""Programs whose workers are forked from one warm process: runs of the slow tests need not import torch again.

The process that a launcher would start, which imports the modules and then forks workers, is forked from the warm one.
It has the same socket, loop and command line. Launchers whose environment differs start their own as usual, and so do
all if the warm process has ended.
"""

import atexit
import contextlib
import functools
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from realhf.launch import fork_server
from realhf.launch.fork_server import NUMPY_THREADS, ForkServer
from realhf.launch.local import WORKER, worker_environment

ADDRESS = "TEST_WARM_START"
REPOSITORY = Path(__file__).parents[1]
PROGRAM = [sys.executable, "-c", "from tests.warm_start import console; console()"]
READ_BY_IMPORTS = (
    *("PYTHON", "LD_", "LC_", "LANG", "HOME", "TMPDIR", "XDG_", "OMP_", "MKL_", "KMP_", "GOMP_", "TORCH", "PYTORCH"),
    *("ATEN_", "CUDA", "NCCL_", "GLOO_", "HF_", "TRANSFORMERS_", "TOKENIZERS_", "REALHF_"),
)
"""First parts of the variables that a module may read when it is imported; the others differ between tests."""
REQUEST_BYTES = 1 << 17
START_S = 120.0


class Forked:
    """The process of a fork server that is not a child, with the methods of ``Popen`` that it needs."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            fork_server.readable(os.pidfd_open(self.pid), START_S)


class WarmForkServer(ForkServer):
    def __init__(self, module: str, environment: Mapping[str, str]) -> None:
        mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        request = json.dumps([module, dict(environment), os.getcwd()]).encode()
        with theirs:
            pid = forked_from(os.environ[ADDRESS], request, theirs.fileno())
        if pid is None:
            mine.close()
            super().__init__(module, environment)
        else:
            self.environment, self.workers, self._socket = dict(environment), {}, mine
            self._process = Forked(pid)  # type: ignore[assignment]


def forked_from(address: str, request: bytes, fd: int) -> int | None:
    """Return the process id of a fork server at the other end of ``fd``; None if the warm process makes none."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as warm, contextlib.suppress(OSError):
        warm.settimeout(START_S)
        warm.connect(address)
        socket.send_fds(warm, [request], [fd])
        pid: int | None = json.loads(warm.recv(64) or "null")
        return pid
    return None


def console() -> None:
    """The program ``realhf``."""
    from realhf.apps.main import console

    if os.environ.get(ADDRESS):
        fork_server.ForkServer = WarmForkServer  # type: ignore[misc]
    console()


@functools.cache
def address() -> str:
    """Start a warm process, which ends with this one, and return its address."""
    folder = tempfile.mkdtemp(prefix="warm")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    path, environment = str(Path(folder, "socket")), NUMPY_THREADS | worker_environment(1)
    process = subprocess.Popen([sys.executable, "-m", "tests.warm_start", path], cwd=REPOSITORY, env=environment,
                               stdin=subprocess.PIPE, stdout=subprocess.PIPE)  # fmt: skip
    atexit.register(process.kill)
    assert process.stdout is not None
    is_ready = fork_server.readable(process.stdout.fileno(), START_S) and process.stdout.readline() == b"ready\n"
    assert is_ready, f"the warm process is not ready after {START_S:g} s, or has failed"
    return path


def compared(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name.startswith(READ_BY_IMPORTS)}


def serve(path: str) -> None:
    """Fork a fork server for each launcher that connects, until standard input ends."""
    module = WORKER[-1]
    assert fork_server.preload(module), "a fork would lose threads"
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nothing waits for the fork servers
    own = compared(os.environ)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(path)
    listener.listen(64)
    print("ready", flush=True)
    poll = select.poll()
    for source in (sys.stdin, listener):
        poll.register(source, select.POLLIN)
    while all(fd == listener.fileno() for fd, _ in poll.poll()):
        connection, _ = listener.accept()
        with connection:
            request, (fd,), _, _ = socket.recv_fds(connection, REQUEST_BYTES, 1)
            name, environment, folder = json.loads(request)
            is_same = name == module and compared(environment) == own
            if (pid := os.fork() if is_same else None) == 0:
                become(environment, folder, listener, connection)
                return fork_server.serve_module(module, fd)
            connection.send(json.dumps(pid).encode())
            os.close(fd)


def become(environment: Mapping[str, str], folder: str, *unused: socket.socket) -> None:
    """Make a forked process one that a launcher would have started."""
    import setproctitle

    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for end in unused:
        end.close()
    nothing = os.open(os.devnull, os.O_RDWR)
    for standard in range(3):
        os.dup2(nothing, standard)
    os.close(nothing)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    setproctitle.setproctitle(f"{sys.executable} -m {fork_server.__name__} {WORKER[-1]}")


if __name__ == "__main__":
    serve(sys.argv[1])
