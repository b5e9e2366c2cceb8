"""Worker processes on this machine: one per worker, its own process group, its own log file."""

import contextlib
import os
import signal
import subprocess
import time
from pathlib import Path

from realhf.base.paths import RunDir
from realhf.launch.command import how_it_ended, shared_environment, worker_command

STOP_S = 5.0
"""How long a worker may take to leave before it is killed."""

DUMP_S = 0.5
"""How long workers have to write their stacks."""


class LocalLauncher:
    def __init__(self, paths: RunDir, n_workers: int, threads: int) -> None:
        self.paths, self.n_workers = paths, n_workers
        self.threads = threads or max(1, (os.cpu_count() or 1) // n_workers)
        self.processes: list[subprocess.Popen] = []

    def prepare(self) -> str:
        return ""

    def start(self, address: str) -> None:
        for rank in range(self.n_workers):
            command = worker_command(self.paths, rank, address)
            log = self.paths.log(f"worker-{rank}")
            self.processes.append(start_worker(command, shared_environment(self.threads), log))

    def dead(self) -> dict[int, str]:
        codes = {rank: process.poll() for rank, process in enumerate(self.processes)}
        return {rank: how_it_ended(code) for rank, code in codes.items() if code is not None}

    def state(self, rank: int) -> str:
        return state_of(self.processes[rank])

    def dump_stacks(self) -> None:
        for process in self.processes:
            ask_for_stacks(process)
        time.sleep(DUMP_S)

    def wait(self, timeout_s: float) -> dict[int, str]:
        end = time.monotonic() + timeout_s
        for process in self.processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, end - time.monotonic()))
        late = {rank: "is still there" for rank, process in enumerate(self.processes) if process.returncode is None}
        return late | {rank: how for rank, how in self.dead().items() if self.processes[rank].returncode}

    def stop(self) -> None:
        for number, patience in ((signal.SIGTERM, STOP_S), (signal.SIGKILL, STOP_S)):
            for process in self.processes:
                if process.poll() is None:
                    os.killpg(process.pid, number)
            self.wait(patience)
        for process in self.processes:
            if process.stdin:
                process.stdin.close()


def state_of(process: subprocess.Popen) -> str:
    """Return the state of a process of this machine, such as ``T (stopped)``; empty if it is not there."""
    status = Path(f"/proc/{process.pid}/status")
    lines = status.read_text().splitlines() if status.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("State:")), "")


def ask_for_stacks(process: subprocess.Popen) -> None:
    """Have a worker of this machine write its stacks, if it lives; one that is stopped goes on for it."""
    if process.poll() is None:
        for number in (signal.SIGUSR1, signal.SIGCONT):
            os.kill(process.pid, number)


def start_worker(command: list[str], environment: dict[str, str], log: Path) -> subprocess.Popen:
    """Start a process that leads a group of its own, writes to ``log`` and leaves when its input ends."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as out:
        return subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=out,
            stderr=out,
            env={**os.environ, **environment},
            start_new_session=True,
        )
