"""Workers forked from a preloaded process: their streams, command lines, exit codes and ends."""

import gc
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from realhf.launch.fork_server import UNKNOWN_STATUS, ForkedProcess, ForkServer, forked, preloaded

PROGRAM = """
import os, signal, sys, time
def preload(): {preload}
def run(arguments):
    print("arguments", ascii(arguments), os.getpid() == os.getsid(0), flush=True)
    print("to stderr", sorted(map(int, os.listdir("/proc/self/fd")))[:-1], file=sys.stderr, flush=True)
    print(*sorted(os.environ), sep=" ", flush=True)
    action = arguments[0]
    if action == "echo": print(sys.stdin.read())
    elif action == "raise": raise ValueError("wrong")
    elif action == "kill": os.kill(os.getpid(), signal.SIGKILL)
    else: sys.exit(int(action))
"""
THREAD = "import threading; threading.Thread(target=time.sleep, args=(2,)).start()"
ENDS = {"0": 0, "7": 7, "raise": 1, "kill": -signal.SIGKILL}


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "program.py").write_text(PROGRAM.format(preload="pass"))
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}


@pytest.fixture
def server(environment: dict[str, str]) -> Iterator[ForkServer]:
    server = ForkServer("program", environment)
    yield server
    server.close()


def fork(server: ForkServer, arguments: Sequence[str], log: Path) -> ForkedProcess:
    with log.open("ab") as out:
        process = server.fork(arguments, out)
    assert process is not None
    return process


def test_every_end_is_reported(server: ForkServer, tmp_path: Path) -> None:
    """In any order of waiting, and with the same streams and descriptors as a program that was started alone."""
    odd = "with spaces, é, \udcff"  # the name of a folder may be any bytes
    processes = {action: fork(server, [action, odd], tmp_path / action) for action in ENDS}
    for action, process in reversed(processes.items()):
        assert process.wait(60) == ENDS[action] == process.poll() == process.returncode
        first, second, names, *others = (tmp_path / action).read_text().splitlines()
        assert set(names.split()) - {"LC_CTYPE"} == set(server.environment) - {"LC_CTYPE"}
        assert first == f"arguments {ascii([action, odd])} True" and second.startswith("to stderr [0, 1, 2")
        assert (others[-1:] == ["ValueError: wrong"]) == (action == "raise")


def test_a_worker_reads_its_pipe_and_has_its_own_command_line(server: ForkServer, tmp_path: Path) -> None:
    process, other = (fork(server, ["echo", name], tmp_path / name) for name in ("a", "b"))
    for each, name in ((process, "a"), (other, "b")):
        command = Path(f"/proc/{each.pid}/cmdline")
        end = time.monotonic() + 60
        while not (tmp_path / name).read_text() and time.monotonic() < end:
            time.sleep(0.01)
        assert command.read_text().rstrip("\0").replace("\0", " ") == f"{sys.executable} -m program echo {name}"
        assert each.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.01)
    process.stdin.write(b"input")
    process.stdin.close()
    assert process.wait(60) == 0 and (tmp_path / "a").read_text().splitlines()[-1] == "input"
    assert other.poll() is None  # its pipe is open in no process but this one
    other.stdin.close()
    assert other.wait(60) == 0


def test_workers_outlive_their_server_until_their_input_ends(server: ForkServer, tmp_path: Path) -> None:
    process = fork(server, ["echo"], tmp_path / "log")
    server.close()
    assert process.poll() is None
    process.stdin.close()
    assert process.wait(60) == UNKNOWN_STATUS and fork_after_close(server, tmp_path)


def fork_after_close(server: ForkServer, tmp_path: Path) -> bool:
    with (tmp_path / "log").open("ab") as out:
        return server.fork(["0"], out) is None


@pytest.mark.parametrize("preload", ["1 / 0", THREAD, "os._exit(0)", "os.kill(os.getpid(), signal.SIGKILL)"])
def test_without_a_server_there_is_no_fork(preload: str, environment: dict[str, str], tmp_path: Path) -> None:
    """The launcher then starts a program."""
    (tmp_path / "program.py").write_text(PROGRAM.format(preload=preload))
    gc.collect()  # pipes of other tests
    n_open = len(os.listdir("/proc/self/fd"))
    with preloaded("program", environment):
        assert forked(["0"], {**environment, "OMP_NUM_THREADS": "99"}, tmp_path / "log") is None
        assert forked(["0"], environment, tmp_path / "log") is None
    assert len(os.listdir("/proc/self/fd")) == n_open


def test_only_workers_in_the_context_are_forked(environment: dict[str, str], tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert forked(["0"], environment, log) is None
    with preloaded("program", environment):
        process = forked(["0"], environment, log)
        assert process is not None and process.wait(60) == 0
    with preloaded("program", None):
        assert forked(["0"], environment, log) is None
