"""Options of launchers, the planner and metric sinks."""

from dataclasses import dataclass

from realhf.api.config.choices import WandbMode
from realhf.api.config.option import COUNT, FILE, GIGABYTES, NON_NEGATIVE, PATH, POSITIVE, SECONDS, SEED, Range, opt


@dataclass
class SlurmConfig:
    """Options of a SLURM job with n_nodes x n_gpus_per_node tasks. Empty strings use the cluster's defaults."""

    partition: str = opt("", "partition")
    account: str = opt("", "account")
    qos: str = opt("", "quality of service")
    time: str = opt("", "time limit of the job, such as 12:00:00")
    signal_s: int = opt(
        300, "seconds before the time limit at which a run with checkpoints stops, 0: never", Range(0, 65535)
    )
    constraint: str = opt("", "required node features")
    exclusive: bool = opt(False, "allocate whole nodes")
    cpus_per_worker: int = opt(1, "number of cores per worker", COUNT)
    mem_per_node: str = opt("", "memory per node, such as 200G; 0 for all memory")
    gpu: str = opt("gpu", "generic resource of a GPU, such as gpu:a100 (device=cuda)")
    container_image: str = opt("", "container image of the workers (srun --container-image)")
    container_mounts: str = opt("", "mounts of the container (srun --container-mounts)")
    python: str = opt("", "Python interpreter of the workers (default: the current one)", FILE)
    setup: list[str] = opt(list, "shell commands before the run, such as 'module load cuda'")
    extra: list[str] = opt(list, "further sbatch options, such as --mail-type=END")
    array_seeds: list[int] = opt(list, "seeds of a job array with one run per seed", SEED)


@dataclass
class RayConfig:
    address: str = opt("", "address of a Ray cluster, HOST:PORT or auto (default: start a local cluster)")
    cpus_per_worker: int = opt(1, "number of cores per worker", COUNT)


@dataclass
class PlannerConfig:
    """Assumptions of the cost model, and limits of the plan search."""

    profile: str = opt("", "profile of this machine (default: fileroot/profile.json, if it exists)", FILE)
    hardware: str = opt("", "hardware limits of what is not measured: a100, h100, h200, cpu or a YAML file", FILE)
    memory_gb: float | None = opt(None, "memory per worker in GB (default: device, or equal CPU share)", GIGABYTES)
    new_tokens: float | None = opt(None, "expected mean length of responses in tokens, of a log-normal distribution "
                                   "(default: all have max_new_tokens)", POSITIVE)  # fmt: skip
    lengths: str = opt("", "expected lengths of responses: lognormal(MEAN,SIGMA), uniform(MIN,MAX), fixed(N), a file "
                       "of lengths or of generations/, or an earlier run (its folder, TRIAL or EXPERIMENT/TRIAL)",
                       PATH)  # fmt: skip
    env_latency: float = opt(0.0, "expected seconds of a call of an environment, as actor_gen/env_step_s of a run",
                             NON_NEGATIVE)  # fmt: skip
    env_turns: float | None = opt(None, "expected replies per episode (default: env.max_turns)", POSITIVE)
    mtbf_hours: float = opt(
        50_700.0,
        "mean hours between failures per worker, for exp_ctrl.ckpt_freq_steps=auto "
        "(default: the 419 in 54 days of 16,384 GPUs of Llama 3 405B)",
        POSITIVE,
    )
    startup_s: float = opt(
        180.0,
        "expected seconds of a restart without reading the checkpoint, for exp_ctrl.ckpt_freq_steps=auto",
        SECONDS,
    )
    checkpoint_s: float | None = opt(
        None,
        "measured seconds of writing a checkpoint, for exp_ctrl.ckpt_freq_steps=auto (default: by planner.hardware)",
        SECONDS,
    )
    reward_latency: float = opt(0.0, "expected seconds to judge a response with all of reward.fns (0: as profiled)",
                                NON_NEGATIVE)  # fmt: skip
    dollars_per_gpu_hour: float = opt(0.0, "price of a GPU in dollars per hour, for the cost of a step", NON_NEGATIVE)
    budget_s: float = opt(60.0, "time limit of the plan search in seconds", SECONDS)


@dataclass
class WandbConfig:
    mode: WandbMode = opt(WandbMode.disabled, "disabled, online or offline (extra wandb)")
    project: str | None = opt(None, "project")
    entity: str | None = opt(None, "entity")
    name: str | None = opt(None, "run name")


@dataclass
class TensorboardConfig:
    enabled: bool = opt(True, "write TensorBoard events to tensorboard/ in the run directory")
