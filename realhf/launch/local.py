"""Worker processes on this machine: one per worker, its own process group, its own log file.

A worker's standard input is a pipe that only the launcher holds: when the launcher goes, however it goes, the worker
reads its end and leaves.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from realhf.base.paths import RunDir

STOP_S = 5.0
"""How long a worker may take to leave before it is killed."""

DUMP_S = 0.5
"""How long workers have to write their stacks."""


class LocalLauncher:
    def __init__(self, paths: RunDir, n_workers: int, address: str, threads: int) -> None:
        self.paths, self.n_workers, self.address = paths, n_workers, address
        self.threads = threads or max(1, (os.cpu_count() or 1) // n_workers)
        self.processes: list[subprocess.Popen] = []

    def start(self) -> None:
        (self.paths.root / "logs").mkdir(parents=True, exist_ok=True)
        for rank in range(self.n_workers):
            self.processes.append(self._spawn(rank))

    def _spawn(self, rank: int) -> subprocess.Popen:
        command = [sys.executable, "-m", "realhf.apps.worker", str(self.paths.root), str(rank), self.address]
        # idle OpenMP threads must not spin: the ranks of one machine share its cores
        shared = {"OMP_NUM_THREADS": str(self.threads), "OMP_WAIT_POLICY": "PASSIVE", "TOKENIZERS_PARALLELISM": "false"}
        package_root = str(Path(__file__).resolve().parents[2])
        python_path = os.pathsep.join(filter(None, [package_root, os.environ.get("PYTHONPATH", "")]))
        with self.paths.log(f"worker-{rank}").open("ab") as log:
            return subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env={**os.environ, **shared, "PYTHONPATH": python_path},
                start_new_session=True,
            )

    def dead(self) -> dict[int, str]:
        """Return the workers that ended, with the words for how."""
        ended = {}
        for rank, process in enumerate(self.processes):
            code = process.poll()
            if code is not None:
                ended[rank] = f"was ended by {_signal_name(-code)}" if code < 0 else f"exited with code {code}"
        return ended

    def state(self, rank: int) -> str:
        """Return what the operating system says of a worker's process, such as ``T (stopped)``; empty if nothing."""
        status = Path(f"/proc/{self.processes[rank].pid}/status")
        lines = status.read_text().splitlines() if status.exists() else []
        return next((line.partition(":")[2].strip() for line in lines if line.startswith("State:")), "")

    def dump_stacks(self) -> None:
        """Have every worker write the stacks of its threads to its log; those that are stopped go on for it."""
        living = [process.pid for process in self.processes if process.poll() is None]
        for number in (signal.SIGUSR1, signal.SIGCONT):
            for pid in living:
                os.kill(pid, number)
        time.sleep(DUMP_S)

    def wait(self, timeout_s: float) -> dict[int, int]:
        """Wait for all workers to leave by themselves; return their exit codes (those still there are left out)."""
        end = time.monotonic() + timeout_s
        for process in self.processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, end - time.monotonic()))
        return {rank: p.returncode for rank, p in enumerate(self.processes) if p.returncode is not None}

    def stop(self) -> None:
        """End every worker and whatever it started; first with a request, then without."""
        for number, patience in ((signal.SIGTERM, STOP_S), (signal.SIGKILL, STOP_S)):
            for process in self.processes:
                if process.poll() is None:
                    os.killpg(process.pid, number)
            self.wait(patience)
        for process in self.processes:
            if process.stdin:
                process.stdin.close()


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
