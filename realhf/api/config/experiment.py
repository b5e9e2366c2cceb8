"""Options of every experiment."""

from dataclasses import dataclass

from realhf.api.config.choices import Device, Mode, RecoverMode
from realhf.api.config.dataset import DatasetConfig
from realhf.api.config.launch import PlannerConfig, RayConfig, SlurmConfig, TensorboardConfig, WandbConfig
from realhf.api.config.model import VllmConfig
from realhf.api.config.option import opt


@dataclass
class ExperimentControl:
    total_train_epochs: int = opt(1, "number of passes over the data")
    total_train_steps: int | None = opt(None, "maximum number of steps")
    eval_at_start: bool = opt(True, "evaluate on held-out rows before the first step")
    eval_freq_steps: int | None = opt(None, "evaluate every this many steps, and at the end")
    eval_freq_epochs: int | None = opt(None, "evaluate every this many epochs")
    eval_freq_secs: int | None = opt(None, "evaluate every this many seconds")
    keep_best: str = opt("", "metric of the evaluation that selects the models in best/, such as eval/accuracy; "
                             "-eval/loss to minimize")  # fmt: skip
    save_freq_steps: int | None = opt(None, "save models to models/ every this many steps, and at the end")
    save_freq_epochs: int | None = opt(None, "save models every this many epochs")
    save_freq_secs: int | None = opt(None, "save models every this many seconds")
    ckpt_freq_steps: int | None = opt(None, "write a checkpoint every this many steps, and at the end")
    ckpt_freq_epochs: int | None = opt(None, "write a checkpoint every this many epochs")
    ckpt_freq_secs: int | None = opt(None, "write a checkpoint every this many seconds")
    keep_last: int = opt(2, "number of checkpoints to keep, 0 for all")


@dataclass
class ExperimentConfig:
    experiment_name: str = opt("", "first part of the run directory (default: the name of the experiment)")
    trial_name: str = opt("", "second part of the run directory (default: run and the time)")
    fileroot: str = opt("runs", "parent folder of all run directories")
    overwrite: bool = opt(False, "replace an existing run directory")
    mode: Mode = opt(Mode.local, "local: one process per worker; inline: one process, for debugging; ray; slurm")
    device: Device = opt(Device.auto, "device type: cpu, cuda, or auto to detect it")
    n_nodes: int = opt(1, "number of machines; more than one requires mode=slurm or mode=ray")
    n_gpus_per_node: int = opt(1, "number of workers per machine; with device=cpu a worker is a process")
    allocation_mode: str = opt("heuristic", "execution plan: heuristic, search, manual, d2t1p1, or actor_gen:d2,*:d1")
    seed: int = opt(1, "random seed")
    threads_per_worker: int = opt(0, "number of CPU threads per worker, 0 for cores / workers")
    startup_timeout: float = opt(180.0, "timeout of worker startup in seconds")
    heartbeat_timeout: float = opt(60.0, "seconds without a heartbeat after which a worker is lost, 0 to disable")
    channel_address: str = opt("", "listen address of the master, tcp://HOST:PORT (default: a private local socket)")
    recover_mode: RecoverMode = opt(RecoverMode.disabled, "disabled, resume, fault (restart a failed run), auto (both)")
    recover_retries: int = opt(1, "number of restarts after failures, with recover_mode=fault or auto")
    max_device_failures: int = opt(2, "worker failures after which a restart excludes the device (mode=local)")
    recover_allocation: str = opt("", "allocation_mode of restarts with fewer workers (default: unchanged if possible)")
    devices: list[int] = opt(list, "CUDA device indices of the workers (mode=local; default: the first devices)")
    max_staleness: int = opt(0, "maximum number of steps that generation may run ahead of training; 0 is on-policy")
    logprob_diff_warning: float = opt(0.1, "warn above this trainer-generator log-prob difference in nats, 0: never")
    call_timeout: float = opt(3600.0, "timeout of a request to the workers in seconds")
    verify_reallocation: bool = opt(False, "compare checksums of the weights after every reallocation")
    n_logged_generations: int = opt(8, "number of rows written to generations/ per step")
    save_roles: list[str] = opt(list, "roles whose models are saved (default: all trained roles)")
    exp_ctrl: ExperimentControl = opt(ExperimentControl, "length of the run, evaluation, saving and checkpoints")
    dataset: DatasetConfig = opt(DatasetConfig, "dataset")
    planner: PlannerConfig = opt(PlannerConfig, "cost model and plan search")
    vllm: VllmConfig = opt(VllmConfig, "vLLM engines, for calls with backend=vllm")
    slurm: SlurmConfig = opt(SlurmConfig, "SLURM job, with mode=slurm")
    ray: RayConfig = opt(RayConfig, "Ray cluster, with mode=ray")
    wandb: WandbConfig = opt(WandbConfig, "Weights & Biases")
    tensorboard: TensorboardConfig = opt(TensorboardConfig, "TensorBoard")

    def warnings(self) -> list[str]:
        """Return warnings about valid but questionable options, one line each."""
        return []
