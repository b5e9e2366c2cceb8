"""Jobs of ``realhf profile`` on several machines: their directory, and what its leader and its workers do.

The directory has the options; logs and progress are written to it. Launchers start workers as for a run.
"""

import os
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from realhf.api.codec import from_json, to_json
from realhf.api.config import Device, ExperimentConfig, Mode
from realhf.api.config.launch import RayConfig, SlurmConfig
from realhf.api.config.option import COUNT, SECONDS, Range, opt
from realhf.apps.profiles.profile_file import update_profile
from realhf.arch.hf_config import read_hf_config
from realhf.base.atomic_io import atomic_write
from realhf.base.errors import RunFailed, damage_reported
from realhf.base.paths import RunDir
from realhf.base.process import uninterrupted
from realhf.launch import Launcher
from realhf.launch.cuda import cuda_environment
from realhf.launch.local import describe_exit
from realhf.launch.network import host_of
from realhf.launch.ray import RayLauncher
from realhf.launch.slurm import SlurmLauncher
from realhf.launch.slurm_job import LogTail
from realhf.plan.machines.profile import Profile

POLL_S = 0.2
TAIL_BYTES = 4096
ADVICE = "start realhf profile again"


@dataclass
class ProfileOptions:
    model: str = opt(
        "", "comma-separated Hugging Face folders or config.json files; the number of layers does not matter"
    )
    n_gpus_per_node: int = opt(1, "number of workers; collectives are measured for 2, 4, ... up to this number", COUNT)
    n_nodes: int = opt(1, "number of machines; two measure the links between nodes (mode=slurm or ray)", Range(1, 64))
    mode: Mode = opt(Mode.local, "local: this machine; slurm: a job; ray: a Ray cluster")
    device: Device = opt(Device.auto, "cpu, cuda, or auto for cuda if available")
    bf16: bool = opt(False, "measure the models in bfloat16")
    threads_per_worker: int = opt(1, "CPU threads per worker", COUNT)
    seconds: float = opt(90.0, "time per model; less gives a rough profile", SECONDS)
    out: str = opt("runs/profile.json", "output file")
    slurm: SlurmConfig = opt(SlurmConfig, "SLURM job, with mode=slurm")
    ray: RayConfig = opt(RayConfig, "Ray cluster, with mode=ray")

    def launch_config(self) -> ExperimentConfig:
        """Return the options of a launch of the workers."""
        return ExperimentConfig(
            experiment_name="realhf", trial_name="profile", mode=self.mode, device=self.device, n_nodes=self.n_nodes,
            n_gpus_per_node=self.n_gpus_per_node, threads_per_worker=self.threads_per_worker, slurm=self.slurm,
            ray=self.ray)  # fmt: skip


def write_job(paths: RunDir, options: ProfileOptions) -> None:
    paths.logs.mkdir(parents=True, exist_ok=True)
    atomic_write(paths.profile_job, to_json(options))


def read_job(paths: RunDir) -> ProfileOptions:
    with damage_reported(paths.profile_job, ADVICE):
        return from_json(paths.profile_job.read_text(), ProfileOptions)


def lead(paths: RunDir) -> None:
    """Start the workers of a job, wait for them, and add their profile to the output file.

    RunFailed if a worker fails. Runs in an allocation of SLURM, or on a node of a Ray cluster.
    """
    from realhf.comm.process_groups import open_rendezvous
    from realhf.system.profiler.profiler import TIMEOUT_S
    from realhf.system.transport.auth import new_key

    options, launcher = read_job(paths), launcher_of(paths)
    try:
        host = host_of(launcher.prepare())
        store = open_rendezvous(host, 0, TIMEOUT_S)
        new_key(paths.key)
        launcher.start(f"tcp://{host}:{store.port}")
        _follow(launcher, options.n_nodes * options.n_gpus_per_node, paths)
    finally:
        with uninterrupted():
            launcher.stop()
            paths.key.unlink(missing_ok=True)
    with damage_reported(result_file(paths), ADVICE):
        profile = from_json(result_file(paths).read_text(), Profile)
    update_profile(Path(options.out), profile, "out")


def launcher_of(paths: RunDir) -> Launcher:
    config = read_job(paths).launch_config()
    launcher = RayLauncher if config.mode is Mode.ray else SlurmLauncher
    return launcher(paths, config, config.device.value)


def result_file(paths: RunDir) -> Path:
    return paths.root / "profile.json"


def _follow(launcher: Launcher, n_workers: int, paths: RunDir) -> None:
    """Print the progress until all workers have exited; RunFailed with the first error."""
    progress = LogTail(paths.progress, "")
    while True:
        ended = launcher.dead()
        progress.poll()
        if failed := {rank: how for rank, how in ended.items() if how != describe_exit(0)}:
            rank = min(failed)
            log = paths.log(f"worker-{rank}")
            raise RunFailed(f"worker {rank} of {n_workers} {failed[rank]}{_last_line(log)}; see {log}")
        if len(ended) == n_workers:
            return
        time.sleep(POLL_S)


def _last_line(log: Path) -> str:
    text = log.read_bytes()[-TAIL_BYTES:].decode(errors="replace").strip() if log.exists() else ""
    return f": {text.splitlines()[-1]}" if text else ""


def work(paths: RunDir, rank: int, address: str) -> None:
    """Measure as one worker of a job; the first one writes the profile."""
    options = read_job(paths)
    if options.device is Device.cuda:  # before CUDA is initialized
        paths.nccl.mkdir(exist_ok=True)
        os.environ.update(cuda_environment(options.launch_config(), paths, rank))
    from realhf.system.profiler.cluster import ClusterWorker, measure_cluster
    from realhf.system.profiler.profiler import ProfileJob

    models = tuple(read_hf_config(path, scalar_head=False) for path in options.model.split(",") if path)
    job = ProfileJob(options.device.value, options.n_gpus_per_node, options.threads_per_worker, options.bf16, models,
                     options.seconds)  # fmt: skip
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    key, start = paths.key.read_bytes(), time.monotonic()
    log = partial(_log, paths.progress, start) if rank == 0 else lambda text: None
    profile = measure_cluster(ClusterWorker(job, options.n_nodes, rank), host, int(port), key, log)
    if profile is not None:
        atomic_write(result_file(paths), to_json(profile))


def _log(file: Path, start: float, text: str) -> None:
    with file.open("a") as out:
        out.write(f"{time.monotonic() - start:6.1f} s  {text}\n")
