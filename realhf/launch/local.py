"""Worker processes on this machine: one per worker, its own process group, its own log file."""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from realhf.api.config import Device, ExperimentConfig, Mode
from realhf.base.paths import RunDir
from realhf.launch.command import how_it_ended, shared_environment, worker_command

STOP_S = 5.0
"""How long a worker may take to leave before it is killed."""

DUMP_S = 0.5
"""How long workers have to write their stacks."""


class LocalLauncher:
    def __init__(self, paths: RunDir, n_workers: int, threads: int, devices: Sequence[int] = ()) -> None:
        """``devices`` are those of this machine, by number, that the workers have; none for the first ones."""
        self.paths, self.n_workers, self.devices = paths, n_workers, devices
        self.threads = threads or max(1, (os.cpu_count() or 1) // n_workers)
        self.processes: list[subprocess.Popen] = []

    def prepare(self) -> str:
        return ""

    def start(self, address: str) -> None:
        environment = shared_environment(self.threads) | visible(self.devices)
        for rank in range(self.n_workers):
            command = worker_command(self.paths, rank, address)
            self.processes.append(start_worker(command, environment, self.paths.log(f"worker-{rank}")))

    def dead(self) -> dict[int, str]:
        codes = {rank: process.poll() for rank, process in enumerate(self.processes)}
        return {rank: how_it_ended(code) for rank, code in codes.items() if code is not None}

    def n_nodes(self) -> int:
        return 1

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


def visible(devices: Sequence[int]) -> dict[str, str]:
    """Return what has CUDA show these devices alone, of those that this process is shown; nothing where none is named.

    All workers see them all: NCCL wants to.
    """
    shown = [word for word in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if word]
    words = [shown[number] if shown else str(number) for number in devices]
    return {"CUDA_VISIBLE_DEVICES": ",".join(words)} if words else {}


def problems(config: ExperimentConfig) -> list[str]:
    """Say why workers cannot have the devices that are named."""
    named, found = config.devices, []
    if named and (config.mode is not Mode.local or config.device is Device.cpu):
        found.append(f"devices={named} is for mode=local device=cuda "
                     f"(got mode={config.mode.value} device={config.device.value})")  # fmt: skip
    if named and (len(set(named)) != config.n_gpus_per_node or min(named) < 0 or len(named) != len(set(named))):
        found.append(f"devices={named} does not name n_gpus_per_node={config.n_gpus_per_node} different devices")
    shown = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    if shown != [""] and named and max(named) >= len(shown):
        found.append(f"devices={named}: CUDA_VISIBLE_DEVICES shows {len(shown)} devices, numbered from 0")
    return found


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
