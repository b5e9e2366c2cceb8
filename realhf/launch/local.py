"""Worker processes on this machine, each with its own process group and log file; their command for all launchers."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from realhf.api.config import Device, ExperimentConfig, Mode
from realhf.base.host_memory import proc_field
from realhf.base.paths import RunDir
from realhf.launch.cuda import VISIBLE, has_gpu, visible_devices
from realhf.launch.fork_server import UNKNOWN_STATUS, ForkedProcess, forked, preloaded

Process = subprocess.Popen[bytes] | ForkedProcess
WORKER = (sys.executable, "-m", "realhf.apps.worker")
"""Program of a worker."""

STOP_S = 5.0
"""Time for a worker to exit before it is killed."""

DUMP_S = 0.5
"""Time for workers to write their stacks."""


class LocalLauncher:
    def __init__(self, paths: RunDir, n_workers: int, threads: int, devices: Sequence[int] = ()) -> None:
        """``devices`` are the CUDA devices of the workers; empty for the first ones."""
        self.paths, self.n_workers, self.devices = paths, n_workers, devices
        self.threads = threads_per_worker(threads, n_workers)
        self.processes: list[Process] = []

    def prepare(self) -> str:
        return ""

    def start(self, address: str) -> None:
        environment = worker_environment(self.threads, self.devices)
        for rank in range(self.n_workers):
            command, log = worker_command(self.paths, rank, address), self.paths.log(f"worker-{rank}")
            process = forked(command[len(WORKER) :], environment, log)
            self.processes.append(process or start_worker(command, self.threads, log, self.devices))

    def dead(self) -> dict[int, str]:
        codes = {rank: process.poll() for rank, process in enumerate(self.processes)}
        return {rank: describe_exit(code) for rank, code in codes.items() if code is not None}

    def n_nodes(self) -> int:
        return 1

    def state(self, rank: int) -> str:
        return proc_field(f"{self.processes[rank].pid}/status", "State")

    def dump_stacks(self) -> None:
        for process in self.processes:
            request_stacks(process)
        time.sleep(DUMP_S)

    def wait(self, timeout_s: float) -> dict[int, str]:
        end = time.monotonic() + timeout_s
        for process in self.processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, end - time.monotonic()))
        late = {rank: "is still running" for rank, process in enumerate(self.processes) if process.returncode is None}
        clean = (0, UNKNOWN_STATUS)
        return late | {rank: how for rank, how in self.dead().items() if self.processes[rank].returncode not in clean}

    def stop(self) -> None:
        for number in (signal.SIGTERM, signal.SIGKILL):
            for process in self.processes:
                if process.poll() is None:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(process.pid, number)
            self.wait(STOP_S)
        for process in self.processes:
            if process.stdin:
                process.stdin.close()


def cuda_visible_devices(devices: Sequence[int]) -> dict[str, str]:
    """Return the environment that restricts CUDA to ``devices`` of the visible ones; each worker selects its own."""
    visible = [device for device in os.environ.get(VISIBLE, "").split(",") if device]
    selected = [visible[number] if visible else str(number) for number in devices]
    return {VISIBLE: ",".join(selected)} if selected else {}


def problems(config: ExperimentConfig) -> list[str]:
    """Return the problems with the option ``devices``."""
    devices, problems = config.devices, []
    if devices and (config.mode is not Mode.local or config.device is Device.cpu):
        problems.append(f"devices={devices} is for mode=local device=cuda "
                        f"(got mode={config.mode.value} device={config.device.value})")  # fmt: skip
    if devices and (not len(set(devices)) == len(devices) == config.n_gpus_per_node):
        problems.append(f"devices={devices} does not name n_gpus_per_node={config.n_gpus_per_node} different devices")
    visible = visible_devices(os.environ)
    if (visible or VISIBLE in os.environ) and devices and max(devices) >= len(visible):
        problems.append(f"devices={devices}: {len(visible)} devices are visible, numbered from 0")
    return problems


def request_stacks(process: Process) -> None:
    """Make a local worker write its stacks; a stopped one is continued."""
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            for number in (signal.SIGUSR1, signal.SIGCONT):
                os.kill(process.pid, number)


def start_worker(command: list[str], threads: int, log: Path, devices: Sequence[int] = ()) -> subprocess.Popen:
    """Start a process in a new session that appends to ``log``, restricted to the CUDA ``devices``, if any.

    Its standard input is a pipe from this process: a worker exits at its end, however the launcher ends.
    """
    environment = worker_environment(threads, devices)
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as out:
        return subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=out, stderr=out, env=environment, start_new_session=True
        )


def preloaded_workers(config: ExperimentConfig) -> contextlib.AbstractContextManager[None]:
    """Import the modules of CPU workers on this machine in the background, for the runs in this context."""
    is_cpu = config.device is Device.cpu or (config.device is Device.auto and not has_gpu())
    if config.mode is not Mode.local or not is_cpu:
        return contextlib.nullcontext()
    n_workers = config.n_nodes * config.n_gpus_per_node
    return preloaded(WORKER[-1], worker_environment(threads_per_worker(config.threads_per_worker, n_workers)))


def threads_per_worker(option: int, n_workers: int) -> int:
    return option or max(1, (os.cpu_count() or 1) // max(1, n_workers))


def worker_environment(threads: int, devices: Sequence[int] = ()) -> dict[str, str]:
    """Return the environment variables of workers with this number of threads, and restricted to these devices."""
    return {
        **os.environ,
        "OMP_NUM_THREADS": str(threads),
        "OMP_WAIT_POLICY": "PASSIVE",  # idle OpenMP threads must not spin
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONPATH": python_path(),
        **cuda_visible_devices(devices),
    }


def worker_command(paths: RunDir, rank: int | str, address: str, python: str = "") -> list[str]:
    """Return the command of a worker; ``rank`` may be the name of an environment variable."""
    program = [python or sys.executable, *WORKER[1:]]
    return [*program, str(paths.root.resolve()), str(rank), address]


def python_path() -> str:
    package_root = str(Path(__file__).resolve().parents[2])
    return os.pathsep.join(filter(None, [package_root, os.environ.get("PYTHONPATH", "")]))


def describe_exit(code: int) -> str:
    """Return the exit status of a process as text; negative codes are signals."""
    if code >= 0:
        return f"exited with code {code}"
    names = {number.value: number.name for number in signal.Signals}
    return f"was ended by {names.get(-code, f'signal {-code}')}"
