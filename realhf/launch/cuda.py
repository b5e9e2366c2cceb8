"""CUDA devices of a host, counted without CUDA; the device and the environment of a worker."""

import contextlib
import os
import re
import socket
import subprocess
from collections.abc import Mapping
from pathlib import Path

from realhf.api.config import ExperimentConfig, Mode
from realhf.base.errors import UserError
from realhf.base.paths import RunDir
from realhf.plan.machines.gpu_kinds import GPU

VISIBLE = "CUDA_VISIBLE_DEVICES"

DEVICE_FILES = Path("/dev")
CONTROL_FILE = "nvidiactl"
NVIDIA_FILE = re.compile(r"nvidia\d+")
QUERY = ("nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits")
QUERY_TIMEOUT_S = 20.0


def visible_devices(environment: Mapping[str, str], files: Path | None = None) -> tuple[str, ...]:
    """Return the devices that CUDA shows to a process with this environment, as entries of CUDA_VISIBLE_DEVICES.

    Containers have the device files of their own GPUs only. As in CUDA, the first invalid entry ends the list.
    """
    files = files or DEVICE_FILES
    if not (files / CONTROL_FILE).exists():
        return ()
    present = tuple(str(i) for i in range(sum(bool(NVIDIA_FILE.fullmatch(file.name)) for file in files.iterdir())))
    if VISIBLE not in environment:
        return present
    names: list[str] = []
    for entry in environment[VISIBLE].split(","):
        name = entry.strip()
        if name not in present and not name.startswith(("GPU-", "MIG-")):
            break
        names.append(name)
    return tuple(names)


def has_gpu() -> bool:
    """Return True if CUDA shows a device to this process."""
    return bool(visible_devices(os.environ))


def parse_gpu(line: str) -> GPU | None:
    """Return the GPU in a line of ``nvidia-smi``, such as ``NVIDIA H100 80GB HBM3, 81559`` (MiB); None for others."""
    name, _, size = line.strip().rpartition(", ")
    return GPU(name, int(size) * 2.0**20) if name and size.isdigit() and int(size) else None


def first_gpu() -> GPU | None:
    """Return the first GPU that CUDA shows to this process; None if there is none, or the driver does not tell."""
    devices = visible_devices(os.environ)
    if not devices or devices[0].startswith("MIG-"):
        return None
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        command = [*QUERY, f"--id={devices[0]}"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=QUERY_TIMEOUT_S, check=True)
        return parse_gpu(done.stdout.partition("\n")[0])
    return None


def device_problems(config: ExperimentConfig) -> list[str]:
    """Return the problem that a node has fewer devices than workers, where the number is known before the launch.

    Ray starts workers where it has devices. Outside of an allocation, SLURM allocates what the job requests.
    """
    needed, count, source = config.n_gpus_per_node, len(visible_devices(os.environ)), "this machine"
    if config.mode is Mode.slurm or config.ray.address:
        on_node = os.environ.get("SLURM_GPUS_ON_NODE", "") if config.mode is Mode.slurm else ""
        if not on_node.isdigit():
            return []
        count, source = int(on_node), "a node of this allocation"
    if needed <= count:
        return []
    limit = f" in {VISIBLE}={os.environ[VISIBLE]}" if VISIBLE in os.environ and source == "this machine" else ""
    return [f"n_gpus_per_node={needed}: {source} has {count} GPUs{limit}; set n_gpus_per_node={count or 1}"
            + ("" if count else " device=cpu")]  # fmt: skip


def worker_device(config: ExperimentConfig, rank: int, visible: tuple[str, ...]) -> str:
    """Return the device of a worker among those of its node; UserError if the node has too few.

    Ray shows every actor its own device only. Other launchers show all devices of the node to all workers.
    """
    if config.mode is Mode.ray and len(visible) == 1:
        return visible[0]
    number = rank % config.n_gpus_per_node
    if number >= len(visible):
        shown = ", ".join(visible) or "none"
        raise UserError(f"worker {rank} is number {number} of n_gpus_per_node={config.n_gpus_per_node} workers, but "
                        f"{socket.gethostname()} shows {len(visible)} GPUs ({shown})")  # fmt: skip
    return visible[number]


def cuda_environment(config: ExperimentConfig, paths: RunDir, rank: int) -> dict[str, str]:
    """Return the environment of a CUDA worker: its own device, as ``cuda:0``, and torch's handling of NCCL errors.

    NCCL reaches the devices of other workers although they are not visible. An operation that exceeds its deadline ends
    the worker; torch writes the last operations of every rank to ``paths.flight_record(rank)``.
    """
    return {
        VISIBLE: worker_device(config, rank, visible_devices(os.environ)),
        "CUDA_DEVICE_MAX_CONNECTIONS": "8",  # with 1, a message that waits for its peer holds back all other work
        "TORCH_NCCL_BLOCKING_WAIT": "0",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3",  # end the process, without aborting communicators
        "TORCH_NCCL_TRACE_BUFFER_SIZE": os.environ.get("TORCH_NCCL_TRACE_BUFFER_SIZE", "2000"),
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": str(paths.flight_record("").resolve()),
    }
