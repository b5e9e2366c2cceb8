"""Options of launchers, the planner and metric sinks."""

from dataclasses import dataclass

from realhf.api.config.option import opt


@dataclass
class SlurmConfig:
    """What a job asks for, beside n_nodes with n_gpus_per_node tasks each. An empty text leaves it to the cluster."""

    partition: str = opt("", "partition")
    account: str = opt("", "account")
    qos: str = opt("", "quality of service")
    time: str = opt("", "longest time of the job, like 12:00:00")
    constraint: str = opt("", "features that nodes must have")
    exclusive: bool = opt(False, "whole nodes, shared with no other job")
    cpus_per_worker: int = opt(1, "cores of one worker")
    mem_per_node: str = opt("", "memory of a node, like 200G; 0 for all of it")
    gpu: str = opt("gpu", "what a GPU is called there, like gpu:a100 (device=cuda)")
    container_image: str = opt("", "image that workers run in (srun --container-image)")
    container_mounts: str = opt("", "what such a container sees of the outside (srun --container-mounts)")
    python: str = opt("", "python of the workers (default: the one that launches)")
    setup: list[str] = opt(list, "lines of shell before the run, like 'module load cuda'")
    extra: list[str] = opt(list, "further options of sbatch, like --mail-type=END")
    array_seeds: list[int] = opt(list, "one run for each of these seeds, as one array of jobs")


@dataclass
class RayConfig:
    address: str = opt("", "a Ray cluster, HOST:PORT or auto; empty to start one on this machine for the run")
    cpus_per_worker: int = opt(1, "cores of one worker")


@dataclass
class PlannerConfig:
    """What predictions and plan search assume."""

    profile: str = opt("", "measurements of this machine, by realhf profile (default: fileroot/profile.json, if there)")
    hardware: str = opt("", "a100, h100, h200, cpu or a YAML file, where there is no profile (default: by device)")
    memory_gb: float | None = opt(None, "memory of one worker (default: the device's, or its share of this machine's)")
    new_tokens: float | None = opt(None, "tokens of a typical answer (default: max_new_tokens)")
    budget_s: float = opt(60.0, "longest time of a search, in seconds")


@dataclass
class WandbConfig:
    mode: str = opt("disabled", "disabled, online or offline (extra wandb)")
    project: str | None = opt(None, "project")
    entity: str | None = opt(None, "entity")
    name: str | None = opt(None, "run name")


@dataclass
class TensorboardConfig:
    enabled: bool = opt(True, "write tensorboard/ in the run directory")
