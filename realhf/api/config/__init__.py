"""User options as plain dataclasses for OmegaConf: not frozen, no Literal, no optional nested dataclass."""
# ruff: noqa: F401  (re-exports)

from dataclasses import dataclass, field
from typing import Any

from realhf.api.config.choices import (
    Backend,
    Delta,
    Device,
    KLEstimator,
    KLPlace,
    LossAggregation,
    LRSchedule,
    Mode,
    OnBadRow,
    OptimizerType,
    RecoverMode,
    StepSplitter,
    ValueNormType,
)


def opt(default: Any, text: str) -> Any:
    """Return a dataclass field with a default (or a factory of it) and the text that ``--help`` shows."""
    if callable(default):
        return field(default_factory=default, metadata={"help": text})
    return field(default=default, metadata={"help": text})


@dataclass
class OptimizerConfig:
    type: OptimizerType = opt(OptimizerType.adam, "adam, or none for a model without updates")
    lr: float = opt(1e-5, "peak learning rate")
    weight_decay: float = opt(0.05, "decoupled weight decay, matrices only")
    beta1: float = opt(0.9, "Adam beta1")
    beta2: float = opt(0.95, "Adam beta2")
    eps: float = opt(1e-5, "Adam epsilon")
    min_lr_ratio: float = opt(0.0, "final learning rate divided by the peak")
    lr_scheduler_type: LRSchedule = opt(LRSchedule.cosine, "learning-rate decay after warmup")
    warmup_steps_proportion: float = opt(0.02, "fraction of all steps with linear warmup")
    gradient_clipping: float = opt(1.0, "maximum global gradient norm, 0 for no clipping")


@dataclass
class ModelSpec:
    path: str | None = opt(None, "Hugging Face folder with weights, config and tokenizer")
    config: str | None = opt(None, "config.json (or its folder), with init_from_scratch")
    tokenizer: str | None = opt(None, "tokenizer folder (default: path)")
    init_from_scratch: bool = opt(False, "initialize random weights from config, seeded")
    init_critic_from_actor: bool = opt(False, "replace the vocabulary head of a language model by a new scalar head")
    bf16: bool | None = opt(None, "bfloat16 parameters with float32 master weights (default: on GPUs only)")
    offload: bool = opt(False, "offload the weights to host memory between calls (untrained roles)")
    gradient_checkpointing: bool = opt(False, "recompute activations in the backward pass")
    sequence_parallel: bool = opt(True, "sequence parallelism in training with tensor parallelism")
    backend: Backend = opt(Backend.native, "training backend: native, or megatron on GPUs")
    optimizer: OptimizerConfig = opt(OptimizerConfig, "optimizer")


@dataclass
class ParallelConfig:
    data_parallel_size: int = opt(1, "data-parallel size")
    tensor_parallel_size: int = opt(1, "tensor-parallel size")
    pipeline_parallel_size: int = opt(1, "pipeline-parallel size")


@dataclass
class MicroBatchConfig:
    n_mbs: int = opt(1, "minimum number of micro-batches")
    max_tokens_per_mb: int | None = opt(None, "maximum tokens per micro-batch (default: 4096 on CPU, 16384 on GPU)")


@dataclass
class VllmConfig:
    python: str | None = opt(None, "Python interpreter with vLLM (default: the current one)")
    kv_cache_gb: float = opt(1.0, "KV cache of each engine in GB")
    max_length: int = opt(0, "maximum sequence length in tokens, 0 for the maximum of the model")
    max_num_seqs: int = opt(256, "maximum number of sequences decoded at a time")
    pack: bool = opt(True, "on CPU, pack weights for vLLM's kernels: faster decoding, slower weight updates")
    timeout: float = opt(600.0, "timeout of startup, weight updates and generation calls in seconds")


@dataclass
class MFCConfig:
    device_mesh: str | None = opt(None, "workers, such as node01:0-3 or 0-1 (allocation_mode=manual; default: all)")
    parallel: ParallelConfig = opt(ParallelConfig, "parallel strategy (allocation_mode=manual)")
    mb_spec: MicroBatchConfig = opt(MicroBatchConfig, "micro-batching (any allocation mode)")
    backend: Backend = opt(Backend.native, "engine of the call: native, or vllm for generation (any allocation mode)")


@dataclass
class DatasetConfig:
    path: str = opt("", "training data: a JSONL, JSON or Parquet file")
    max_prompt_len: int = opt(1024, "maximum prompt length in tokens")
    max_seqlen: int = opt(2048, "maximum length of prompt and response together in tokens (sft, rw)")
    train_bs_n_seqs: int = opt(128, "number of prompts per step")
    max_pairs_per_prompt: int = opt(2, "number of pairs sampled per prompt (rw, dpo)")
    max_responses: int = opt(5, "number of responses sampled per prompt from a ranked list (rw.type=ranked)")
    label_noise: float = opt(0.0, "fraction of training pairs whose chosen and rejected responses are swapped")
    eval_path: str = opt("", "held-out data file")
    eval_fraction: float = opt(0.0, "fraction of the rows of path that is held out")
    split_seed: int = opt(1, "seed of the held-out split and of label noise; use one value for a whole ensemble")
    on_bad_row: OnBadRow = opt(OnBadRow.error, "error: stop and name the invalid row; skip: count invalid rows")
    prompt_template: str = opt("{prompt}", "template of every prompt")
    shuffle: bool = opt(True, "shuffle every epoch, seeded")

    @property
    def holds_out(self) -> bool:
        return bool(self.eval_path or self.eval_fraction)


@dataclass
class GenerationConfig:
    n: int = opt(1, "number of responses per prompt (gen only; PPO uses group_size)")
    max_new_tokens: int = opt(256, "maximum response length in tokens, including the stop token")
    min_new_tokens: int = opt(0, "minimum number of tokens before a stop token may be sampled")
    greedy: bool = opt(False, "greedy decoding")
    top_p: float = opt(1.0, "probability mass of nucleus sampling, in (0, 1]")
    top_k: int = opt(0, "sample from the k most likely tokens, 0 for all")
    temperature: float = opt(1.0, "sampling temperature, 0 for greedy decoding")
    stop_token_ids: list[int] = opt(list, "token ids that end a response, in addition to the tokenizer's EOS token")
    max_num_seqs: int = opt(256, "maximum number of sequences decoded at a time (continuous batching)")


@dataclass
class EvaluationConfig:
    """Sampling on held-out prompts; lengths and stop tokens are those of ppo.gen."""

    n: int = opt(1, "number of responses per held-out prompt")
    greedy: bool = opt(True, "greedy decoding")
    top_p: float = opt(1.0, "probability mass of nucleus sampling, in (0, 1]")
    top_k: int = opt(0, "sample from the k most likely tokens, 0 for all")
    temperature: float = opt(1.0, "sampling temperature, 0 for greedy decoding")


@dataclass
class RewardConfig:
    fn: str = opt("math", "math, code, my_file.py:function (def or async def), format:REGEX, or http://host:port/path")
    fns: list[str] = opt(list, "several rewards instead of fn, combined as a weighted sum")
    weights: list[float] = opt(list, "weights of fns (default: 1 each)")
    timeout: float = opt(20.0, "timeout per response in seconds; the judge process is then killed and scoring fails")
    test_timeout: float = opt(6.0, "timeout per test of a program in seconds (code)")
    processes: int = opt(1, "number of judge processes per worker; for a service, number of concurrent requests")
    max_concurrency: int = opt(16, "maximum number of concurrent calls per judge process of an async def function")
    right_reward: float = opt(1.0, "score of a correct response (math, code)")
    wrong_reward: float = opt(-1.0, "score of an incorrect response, or if scoring fails (math, code)")
    format_reward: str = opt("", "regular expression that a response must match completely (math, code)")
    wrong_formatted_reward: float = opt(-0.8, "score of an incorrect response that matches format_reward")
    right_unformatted_reward: float | None = opt(
        None, "score of a correct response that does not match format_reward (default: right_reward)"
    )
    retries: int = opt(3, "number of retries of a failed request to a service")
    token_env: str = opt("", "environment variable with the bearer token of a service")
    check_verifier_status: bool = opt(False, "stop the run when all responses of a step are judged incorrect")


@dataclass
class SlurmConfig:
    """Options of a SLURM job with n_nodes x n_gpus_per_node tasks. Empty strings use the cluster's defaults."""

    partition: str = opt("", "partition")
    account: str = opt("", "account")
    qos: str = opt("", "quality of service")
    time: str = opt("", "time limit of the job, such as 12:00:00")
    constraint: str = opt("", "required node features")
    exclusive: bool = opt(False, "allocate whole nodes")
    cpus_per_worker: int = opt(1, "number of cores per worker")
    mem_per_node: str = opt("", "memory per node, such as 200G; 0 for all memory")
    gpu: str = opt("gpu", "generic resource of a GPU, such as gpu:a100 (device=cuda)")
    container_image: str = opt("", "container image of the workers (srun --container-image)")
    container_mounts: str = opt("", "mounts of the container (srun --container-mounts)")
    python: str = opt("", "Python interpreter of the workers (default: the current one)")
    setup: list[str] = opt(list, "shell commands before the run, such as 'module load cuda'")
    extra: list[str] = opt(list, "further sbatch options, such as --mail-type=END")
    array_seeds: list[int] = opt(list, "seeds of a job array with one run per seed")


@dataclass
class RayConfig:
    address: str = opt("", "address of a Ray cluster, HOST:PORT or auto (default: start a local cluster)")
    cpus_per_worker: int = opt(1, "number of cores per worker")


@dataclass
class PlannerConfig:
    """Assumptions of the cost model, and limits of the plan search."""

    profile: str = opt("", "profile of this machine from realhf profile (default: fileroot/profile.json, if it exists)")
    hardware: str = opt("", "hardware limits without a profile: a100, h100, h200, cpu or a YAML file")
    memory_gb: float | None = opt(None, "memory per worker in GB (default: that of the device, or an equal CPU share)")
    new_tokens: float | None = opt(None, "expected response length in tokens (default: max_new_tokens)")
    budget_s: float = opt(60.0, "time limit of the plan search in seconds")


@dataclass
class WandbConfig:
    mode: str = opt("disabled", "disabled, online or offline (extra wandb)")
    project: str | None = opt(None, "project")
    entity: str | None = opt(None, "entity")
    name: str | None = opt(None, "run name")


@dataclass
class TensorboardConfig:
    enabled: bool = opt(True, "write TensorBoard events to tensorboard/ in the run directory")


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
