"""Options that every experiment shares."""

from dataclasses import dataclass

from realhf.api.config.choices import Device, Mode, RecoverMode
from realhf.api.config.dataset import DatasetConfig
from realhf.api.config.launch import PlannerConfig, RayConfig, SlurmConfig, TensorboardConfig, WandbConfig
from realhf.api.config.model import VllmConfig
from realhf.api.config.option import opt


@dataclass
class ExperimentControl:
    total_train_epochs: int = opt(1, "passes over the data")
    total_train_steps: int | None = opt(None, "stop after this many steps")
    eval_at_start: bool = opt(True, "try held-out rows before the first step")
    eval_freq_steps: int | None = opt(None, "try held-out rows every so many steps (always at the end)")
    eval_freq_epochs: int | None = opt(None, "try held-out rows every so many epochs")
    eval_freq_secs: int | None = opt(None, "try held-out rows when so many seconds have passed")
    keep_best: str = opt("", "metric of held-out rows, like eval/accuracy, or -eval/loss where less is better: the "
                             "models that reached the best so far are kept in best/")  # fmt: skip
    save_freq_steps: int | None = opt(None, "write models/ every so many steps (always at the end)")
    save_freq_epochs: int | None = opt(None, "write models/ every so many epochs")
    save_freq_secs: int | None = opt(None, "write models/ when so many seconds have passed")
    ckpt_freq_steps: int | None = opt(None, "write a checkpoint every so many steps (and at the end)")
    ckpt_freq_epochs: int | None = opt(None, "write a checkpoint every so many epochs")
    ckpt_freq_secs: int | None = opt(None, "write a checkpoint when so many seconds have passed")
    keep_last: int = opt(2, "checkpoints that are kept, 0 for all")


@dataclass
class ExperimentConfig:
    """Options that every experiment has."""

    experiment_name: str = opt("", "first part of the run directory (default: the experiment)")
    trial_name: str = opt("", "second part of the run directory (default: run and the time)")
    fileroot: str = opt("runs", "folder of all runs")
    overwrite: bool = opt(False, "delete a trial directory that already holds a run")
    mode: Mode = opt(Mode.local, "local: a process per worker; inline: all in this process, for debugging; ray; slurm")
    device: Device = opt(Device.auto, "cpu, cuda, or what the machine has")
    n_nodes: int = opt(1, "machines (more than one with mode=slurm or ray)")
    n_gpus_per_node: int = opt(1, "workers per machine; on cpu a worker is a process")
    allocation_mode: str = opt("heuristic", "heuristic, manual, d2t1p1, or actor_gen:d2,*:d1")
    seed: int = opt(1, "seed of everything")
    threads_per_worker: int = opt(0, "CPU threads of one worker, 0 for cores / workers")
    startup_timeout: float = opt(180.0, "seconds a worker may take to come up")
    heartbeat_timeout: float = opt(60.0, "seconds a worker may give no sign of life, busy or not; 0: for ever")
    channel_address: str = opt("", "where the master listens, tcp://HOST:PORT; empty for a private socket of this host")
    recover_mode: RecoverMode = opt(RecoverMode.disabled, "disabled, resume, fault (restart a failed run) or auto")
    recover_retries: int = opt(1, "restarts of a failed run, with recover_mode=fault or auto")
    max_device_failures: int = opt(2, "deaths of a worker after which restarts go on without its device (mode=local)")
    recover_allocation: str = opt(
        "", "allocation_mode of restarts with fewer workers (default: as before, or none if that names a plan)"
    )
    devices: list[int] = opt(list, "numbers of the devices that workers have (mode=local on cuda; default: the first)")
    max_staleness: int = opt(0, "steps that rollout may be ahead of training; 0 is on-policy")
    logprob_diff_warning: float = opt(
        0.1, "nats a token by which trainer and generator may disagree before the run warns; 0: never"
    )
    call_timeout: float = opt(3600.0, "seconds a request to the workers may take")
    verify_reallocation: bool = opt(False, "compare checksums of weights after every move")
    n_logged_generations: int = opt(8, "rows written to generations/ per step")
    save_roles: list[str] = opt(list, "roles whose models are saved (default: every trained one)")
    exp_ctrl: ExperimentControl = opt(ExperimentControl, "length of the run, saving")
    dataset: DatasetConfig = opt(DatasetConfig, "data")
    planner: PlannerConfig = opt(PlannerConfig, "predictions and plan search")
    vllm: VllmConfig = opt(VllmConfig, "processes of vLLM, for calls with backend=vllm")
    slurm: SlurmConfig = opt(SlurmConfig, "what a job asks for, with mode=slurm")
    ray: RayConfig = opt(RayConfig, "where actors run, with mode=ray")
    wandb: WandbConfig = opt(WandbConfig, "Weights & Biases")
    tensorboard: TensorboardConfig = opt(TensorboardConfig, "TensorBoard")

    def warnings(self) -> list[str]:
        """What the options allow and is known to be wrong, one line each."""
        return []
