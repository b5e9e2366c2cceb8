"""Options of every experiment."""

import os
from dataclasses import dataclass, field
from typing import Any

from realhf.api.config.choices import CpuAffinity, Device, Mode, RecoverMode
from realhf.api.config.dataset import DatasetConfig
from realhf.api.config.launch import PlannerConfig, RayConfig, SlurmConfig, TensorboardConfig, WandbConfig
from realhf.api.config.model import VllmConfig
from realhf.api.config.option import COUNT, COUNT_OR_ALL, NATURAL, NON_NEGATIVE, PLAN, SECONDS, SEED, Range, leaves, opt
from realhf.api.curriculum import CurriculumRules, source_names


@dataclass
class ExperimentControl:
    total_train_epochs: int = opt(1, "number of passes over the data", COUNT)
    total_train_steps: int | None = opt(None, "maximum number of steps", COUNT)
    eval_at_start: bool = opt(True, "evaluate on held-out rows before the first step")
    eval_freq_steps: int | None = opt(None, "evaluate every this many steps, and at the end", COUNT)
    eval_freq_epochs: int | None = opt(None, "evaluate every this many epochs", COUNT)
    eval_freq_secs: int | None = opt(None, "evaluate every this many seconds", COUNT)
    async_eval: bool = opt(False, "evaluate during the next step, whose training calls wait until the evaluation's "
                                  "calls have started (with keep_best: are done)")  # fmt: skip
    keep_best: str = opt("", "metric of the evaluation that selects the models in best/, such as eval/accuracy; "
                             "-eval/loss to minimize")  # fmt: skip
    save_freq_steps: int | None = opt(None, "save models to models/ every this many steps, and at the end", COUNT)
    save_freq_epochs: int | None = opt(None, "save models every this many epochs", COUNT)
    save_freq_secs: int | None = opt(None, "save models every this many seconds", COUNT)
    ckpt_freq_steps: int | str | None = opt(None, "write a checkpoint every this many steps, and at the end; auto: as "
                                                  "many as maximize the expected useful time", COUNT)  # fmt: skip
    ckpt_freq_epochs: int | None = opt(None, "write a checkpoint every this many epochs", COUNT)
    ckpt_freq_secs: int | None = opt(None, "write a checkpoint every this many seconds", COUNT)
    keep_last: int = opt(2, "number of checkpoints to keep, 0 for all", NATURAL)


@dataclass
class ResumeConfig:
    accept: list[str] = opt(list, "differences from the checkpoint to accept: code, data, eval_data, reward_file, "
                                  "models, lr_schedule")  # fmt: skip


@dataclass
class ExperimentConfig:
    experiment_name: str = opt("", "first part of the run directory (default: the name of the experiment)")
    trial_name: str = opt("", "second part of the run directory (default: run and the time)")
    fileroot: str = opt("runs", "parent folder of all run directories")
    overwrite: bool = opt(False, "replace an existing run directory")
    mode: Mode = opt(Mode.local, "local: one process per worker; inline: one process, for debugging; ray; slurm")
    device: Device = opt(Device.auto, "device type: cpu, cuda, or auto to detect it")
    n_nodes: int = opt(1, "number of machines; more than one requires mode=slurm or mode=ray", Range(1, 2**16))
    n_gpus_per_node: int = opt(1, "workers per machine; with device=cpu a worker is a process", Range(1, 1024))
    allocation_mode: str = opt(
        "heuristic",
        "execution plan: heuristic, search, manual, d2t1p1, actor_gen:d2@2-3,*:d1, or a plan FILE.json",
        PLAN,
    )
    seed: int = opt(1, "random seed", SEED)
    threads_per_worker: int = opt(0, "number of CPU threads per worker, 0 for cores / workers", NATURAL)
    startup_timeout: float = opt(180.0, "timeout of worker startup in seconds", SECONDS)
    heartbeat_timeout: float = opt(60.0, "seconds without a heartbeat of a lost worker, 0: never", Range(0, 10**6))
    channel_address: str = opt("", "listen address of the master, tcp://HOST:PORT (default: a private local socket)")
    recover_mode: RecoverMode = opt(RecoverMode.disabled, "disabled, resume, fault (restart a failed run), auto (both)")
    recover_retries: int = opt(1, "number of restarts after failures, with recover_mode=fault or auto", NATURAL)
    max_device_failures: int = opt(2, "worker failures after which a restart excludes the device (mode=local)", COUNT)
    recover_allocation: str = opt("", "allocation_mode of restarts with fewer workers (default: unchanged if possible)")
    devices: list[int] = opt(list, "CUDA devices of the workers (mode=local; default: the first ones)", NATURAL)
    cpu_affinity: CpuAffinity = opt(CpuAffinity.none, "numa: run GPU workers on the cores next to their GPU; or none")
    max_staleness: int = opt(0, "steps that generation may run ahead of training; 0 is on-policy", NATURAL)
    logprob_diff_warning: float = opt(0.1, "warn above this trainer-generator difference in nats, 0: off", NON_NEGATIVE)
    call_timeout: float = opt(3600.0, "timeout of a request to the workers in seconds", SECONDS)
    verify_reallocation: bool = opt(False, "compare checksums of the weights after every reallocation")
    n_logged_generations: int = opt(8, "number of rows written to generations/ per step, -1 for all", COUNT_OR_ALL)
    save_roles: list[str] = opt(list, "roles whose models are saved (default: all trained roles and their averages)")
    push_to_hub: str = opt("", "repository ORG/NAME on the hub that receives the final model; a new one is private")
    exp_ctrl: ExperimentControl = opt(ExperimentControl, "length of the run, evaluation, saving and checkpoints")
    resume: ResumeConfig = opt(ResumeConfig, "resuming from a checkpoint")
    dataset: DatasetConfig = opt(DatasetConfig, "dataset")
    planner: PlannerConfig = opt(PlannerConfig, "cost model and plan search")
    vllm: VllmConfig = opt(VllmConfig, "vLLM engines, for calls with backend=vllm")
    slurm: SlurmConfig = opt(SlurmConfig, "SLURM job, with mode=slurm")
    ray: RayConfig = opt(RayConfig, "Ray cluster, with mode=ray")
    wandb: WandbConfig = opt(WandbConfig, "Weights & Biases")
    tensorboard: TensorboardConfig = opt(TensorboardConfig, "TensorBoard")
    interpolations: dict[str, tuple[Any, Any]] = field(default_factory=dict, metadata={"omegaconf_ignore": True})
    """Options given as ``${...}``: text and resolved value by full name. Not an option."""
    snapshots: dict[str, str] = field(default_factory=dict, metadata={"omegaconf_ignore": True})
    """Local paths of the names on the hub that the options had as values. Not an option."""

    def unresolved(self) -> dict[str, Any]:
        """Return the texts of the options given as ``${...}`` whose values have not been replaced since."""
        values = {key: value for key, _, value in leaves(self)}
        return {k: text for k, (text, value) in self.interpolations.items() if k in values and values[k] == value}

    def portable(self, path: str | None) -> str:
        """Return a path in the cache of the hub as ``NAME@COMMIT``, which is the same on all machines, or the path."""
        names = [name for name, local in self.snapshots.items() if local == path]
        if not names or not path:
            return path or ""
        return f"{names[0]}@{os.path.basename(path).partition(':')[0]}"  # the name has the selection too

    def curriculum_rules(self) -> CurriculumRules:
        data, options = self.dataset, self.dataset.curriculum
        band = (options.min_pass_rate, options.max_pass_rate)
        low, high = options.final_min_pass_rate, options.final_max_pass_rate
        return CurriculumRules(
            band,
            (band[0] if low is None else low, band[1] if high is None else high),
            options.recheck_epochs,
            options.pass_reward,
            names=source_names([self.portable(path) for path in data.sources]),
            weights=tuple(data.weights),
            final_weights=tuple(options.final_weights),
            ramp_steps=options.ramp_steps,
            is_sorted=bool(options.sort_by),
        )

    @property
    def data_text(self) -> str:
        """The paths of the training data as text."""
        return ", ".join(map(self.portable, self.dataset.sources))

    def warnings(self) -> list[str]:
        """Return warnings about valid but questionable options, one line each."""
        return []
