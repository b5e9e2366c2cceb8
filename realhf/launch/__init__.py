"""Launchers, which start, poll and stop the processes of a run. One file per mode."""

from collections.abc import Callable
from typing import Protocol

from realhf.api.config import ExperimentConfig, Mode
from realhf.launch import local, ray, slurm
from realhf.launch.elastic import elastic_problems
from realhf.launch.local import LocalLauncher
from realhf.plan.run_spec import RunSpec


class Launcher(Protocol):
    """The workers of one launch. The first ``n_gpus_per_node`` ranks are on the first node, and so on."""

    def prepare(self) -> str:
        """Return the address for the master to bind, ``tcp://HOST:*``; empty for a private socket."""

    def start(self, address: str) -> None:
        """Start all workers, which connect to the master at ``address``."""

    def dead(self) -> dict[int, str]:
        """Return the workers that have ended, and how; do not wait."""

    def n_nodes(self) -> int:
        """Return the number of available nodes, at most that of the run."""

    def state(self, rank: int) -> str:
        """Return the state of a worker's process, such as ``T (stopped)``; empty if unknown."""

    def dump_stacks(self) -> None:
        """Make every worker write its thread stacks to its log. Stopped processes are continued."""

    def wait(self, timeout_s: float) -> dict[int, str]:
        """Wait for all workers to exit; return those that failed or still run, and how."""

    def stop(self) -> None:
        """Terminate all workers and their child processes, then kill the remaining ones."""


LAUNCHERS: dict[Mode, Callable[[RunSpec], Launcher]] = {
    Mode.local: lambda run: LocalLauncher(
        run.paths, run.plan.n_workers, run.config.threads_per_worker, run.config.devices
    ),
    Mode.slurm: lambda run: slurm.SlurmLauncher(run.paths, run.config, run.device),
    Mode.ray: lambda run: ray.RayLauncher(run.paths, run.config, run.device),
}
"""The modes with worker processes."""


def launch_problems(config: ExperimentConfig) -> list[str]:
    """Return the problems with the options of a launch."""
    problems = local.problems(config) + elastic_problems(config)
    if config.mode is Mode.inline and config.n_nodes * config.n_gpus_per_node != 1:
        problems.append("mode=inline runs one worker in this process; set n_nodes=1 n_gpus_per_node=1")
    if config.mode is Mode.local and config.n_nodes != 1:
        problems.append(f"mode=local runs on this machine only; set n_nodes=1 (got {config.n_nodes}), or mode=slurm "
                        "or mode=ray")  # fmt: skip
    if config.mode is Mode.slurm:
        problems += slurm.problems(config)
    elif config.slurm.array_seeds:
        problems.append(f"slurm.array_seeds={config.slurm.array_seeds} is for mode=slurm (got {config.mode.value})")
    if config.mode is Mode.ray:
        problems += ray.problems(config)
    return problems


def missing(config: ExperimentConfig) -> list[str]:
    """Return the programs and packages that a launch lacks on this machine."""
    if config.mode is Mode.slurm:
        return slurm.missing()
    return ray.missing() if config.mode is Mode.ray else []


def launches_elsewhere(config: ExperimentConfig) -> bool:
    """Return True if workers run on machines other than this one."""
    return config.mode is Mode.slurm or (config.mode is Mode.ray and config.ray.address != "")
