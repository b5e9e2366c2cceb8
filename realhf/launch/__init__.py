"""Floor 7: start, poll and stop the processes of a run. One file per way of launching."""

from collections.abc import Callable
from typing import Protocol

from realhf.api.config import ExperimentConfig, Mode
from realhf.launch import local, ray, slurm
from realhf.launch.elastic import elastic_problems
from realhf.launch.local import LocalLauncher
from realhf.plan.run_spec import RunSpec


class Launcher(Protocol):
    """The workers of one launch. Their ranks are laid out by machine: the first ``n_gpus_per_node`` on the first."""

    def prepare(self) -> str:
        """Return where the master is to listen, ``tcp://HOST:*``; empty for a private socket of this machine."""

    def start(self, address: str) -> None:
        """Start all workers; they report to the master at ``address``."""

    def dead(self) -> dict[int, str]:
        """Return the workers that ended, with the words for how. Does not wait."""

    def n_nodes(self) -> int:
        """Return how many nodes there are to launch on now, at the most as many as the run has."""

    def state(self, rank: int) -> str:
        """Return what the operating system says of a worker's process, such as ``T (stopped)``; empty if nothing."""

    def dump_stacks(self) -> None:
        """Have every worker write the stacks of its threads to its log; those that are stopped go on for it."""

    def wait(self, timeout_s: float) -> dict[int, str]:
        """Wait for all workers to leave by themselves; return those that did not do so cleanly, and how it went."""

    def stop(self) -> None:
        """End every worker and whatever it started; first with a request, then without."""


LAUNCHERS: dict[Mode, Callable[[RunSpec], Launcher]] = {
    Mode.local: lambda run: LocalLauncher(
        run.paths, run.plan.n_workers, run.config.threads_per_worker, run.config.devices
    ),
    Mode.slurm: lambda run: slurm.SlurmLauncher(run.paths, run.config, run.device),
    Mode.ray: lambda run: ray.RayLauncher(run.paths, run.config, run.device),
}
"""Every mode that has worker processes."""


def launch_problems(config: ExperimentConfig) -> list[str]:
    """Say why a run cannot have its mode."""
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
    """Say what a launch needs and this machine lacks."""
    if config.mode is Mode.slurm:
        return slurm.missing()
    return ray.missing() if config.mode is Mode.ray else []


def launches_elsewhere(config: ExperimentConfig) -> bool:
    """Tell whether workers run on machines that this one may be unlike."""
    return config.mode is Mode.slurm or (config.mode is Mode.ray and config.ray.address != "")
