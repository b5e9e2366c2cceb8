"""What a user can set. Plain dataclasses for Hydra: never frozen, no Literal, no optional nested dataclass.

Names follow ReaL and AReaL. One dataclass per concept, passed whole.
"""

from dataclasses import dataclass, field
from typing import Any

from realhf.api.choices import (
    Advantage,
    Backend,
    Delta,
    Device,
    GroupStd,
    KLEstimator,
    KLPlace,
    LossMean,
    Mode,
    OnBadRow,
    OptimizerType,
    PolicyLoss,
    RecoverMode,
    Schedule,
    Splitter,
    ValueNormType,
)


def opt(default: Any, text: str) -> Any:
    """A field with a default and the line that ``--help`` shows."""
    if isinstance(default, type) or callable(default):
        return field(default_factory=default, metadata={"help": text})
    return field(default=default, metadata={"help": text})


@dataclass
class OptimizerConfig:
    type: OptimizerType = opt(OptimizerType.adam, "adam, or empty for a model that is never updated")
    lr: float = opt(1e-5, "peak learning rate")
    weight_decay: float = opt(0.05, "decoupled weight decay, on matrices only")
    beta1: float = opt(0.9, "Adam beta1")
    beta2: float = opt(0.95, "Adam beta2")
    eps: float = opt(1e-5, "Adam epsilon")
    min_lr_ratio: float = opt(0.0, "final learning rate over the peak")
    lr_scheduler_type: Schedule = opt(Schedule.cosine, "shape of the decay after warm-up")
    warmup_steps_proportion: float = opt(0.02, "share of all steps spent on linear warm-up")
    gradient_clipping: float = opt(1.0, "largest global gradient norm, 0 for none")


@dataclass
class ModelSpec:
    """One role's model: where its weights come from and how it is trained."""

    path: str | None = opt(None, "Hugging Face folder with weights, config and tokenizer")
    config: str | None = opt(None, "config.json (or its folder) for init_from_scratch")
    tokenizer: str | None = opt(None, "tokenizer folder, when it is not the model's")
    init_from_scratch: bool = opt(False, "random weights from the config, seeded")
    init_critic_from_actor: bool = opt(False, "replace the vocabulary head of a language model by a new scalar head")
    bf16: bool | None = opt(
        None,
        "bfloat16 parameters with a float32 master copy (default: on GPUs; on CPUs results would differ between them)",
    )
    offload: bool = opt(False, "keep the weights in host memory between calls (untrained roles)")
    gradient_checkpointing: bool = opt(False, "recompute activations in the backward pass")
    sequence_parallel: bool = opt(True, "in training with tensor parallelism, share tokens out between the cut layers")
    backend: Backend = opt(Backend.native, "what trains it: native, or megatron on GPUs")
    optimizer: OptimizerConfig = opt(OptimizerConfig, "optimizer")


@dataclass
class ParallelConfig:
    data_parallel_size: int = opt(1, "replicas over the batch")
    tensor_parallel_size: int = opt(1, "cuts inside a layer")
    pipeline_parallel_size: int = opt(1, "cuts between layers")


@dataclass
class MicroBatchConfig:
    n_mbs: int = opt(1, "at least this many micro-batches")
    max_tokens_per_mb: int | None = opt(None, "tokens of one micro-batch at the most (by default 4096 on a CPU, whose"
                                        " caches hold those, and 16384 on a GPU)")  # fmt: skip


@dataclass
class VllmConfig:
    """The processes of vLLM, where a call has backend=vllm."""

    python: str | None = opt(None, "interpreter that has vLLM (default: the one that runs realhf)")
    kv_cache_gb: float = opt(1.0, "memory of each for keys and values")
    max_length: int = opt(0, "longest row in tokens, 0 for all that the model has positions for")
    slots: int = opt(256, "rows decoded at a time")
    pack: bool = opt(
        True, "on a CPU: matrices in the order of vLLM's kernels, faster to draw with, slower to hand over"
    )
    timeout: float = opt(600.0, "seconds that starting, taking weights or a call's answers may take")


@dataclass
class MFCConfig:
    """Where one MFC runs, for allocation_mode=manual, and with what."""

    device_mesh: str | None = opt(None, "workers, like node01:0-3 or 0-1; all of them when unset")
    parallel: ParallelConfig = opt(ParallelConfig, "layout on that mesh")
    mb_spec: MicroBatchConfig = opt(MicroBatchConfig, "micro-batching (in every allocation mode)")
    backend: Backend = opt(Backend.native, "engine of this call: native, or vllm where it generates (in every mode)")


@dataclass
class GenerationConfig:
    """How answers are sampled."""

    n: int = opt(1, "answers per prompt (gen only; PPO uses group_size)")
    max_new_tokens: int = opt(256, "longest answer, in tokens, its stop token included")
    min_new_tokens: int = opt(0, "no stop token is sampled before this many tokens")
    greedy: bool = opt(False, "take the most likely token")
    top_p: float = opt(1.0, "nucleus mass, in (0, 1]")
    top_k: int = opt(0, "only the k most likely tokens, 0 for all")
    temperature: float = opt(1.0, "divides the logits; 0 means greedy")
    stop_token_ids: list[int] = opt(list, "further tokens that end an answer, beside the tokenizer's EOS")
    max_slots: int = opt(256, "rows decoded at a time; finished rows make room for the next prompts")


@dataclass
class DenseConfig:
    """What the steps of an answer add to its reward, by a process reward model (algorithms/dense_rewards.py)."""

    alpha: float = opt(1.0, "weight of step rewards beside the answer's own")
    clip: bool = opt(False, "step rewards become min(q - eta, 0): good steps earn nothing")
    eta: float | None = opt(None, "threshold of clip (default: the mean of all steps of the batch)")
    delta: Delta = opt(Delta.none, "none, paper (q_k - q_k+1) or potential (q_k+1 - q_k)")
    splitter: Splitter = opt(Splitter.line, "what a step is: line or latex")


@dataclass
class PPOConfig:
    """PPO with its tricks (sources in docs and in algorithms/ppo_math.py)."""

    gen: GenerationConfig = opt(GenerationConfig, "sampling")
    ppo_n_minibatches: int = opt(4, "optimizer steps per batch")
    group_size: int = opt(1, "answers per prompt that are trained on")
    generation_size: int | None = opt(None, "answers drawn per prompt; the group_size best by (reward, length) stay")
    kl_ctl: float = opt(0.1, "KL coefficient")
    kl_in: KLPlace = opt(KLPlace.reward, "where the KL penalty goes: reward, loss, or none (no reference at all)")
    kl_reward_estimator: KLEstimator = opt(KLEstimator.k1, "estimate of the KL in the reward")
    kl_loss_estimator: KLEstimator = opt(KLEstimator.k3, "estimate of the KL in the loss")
    kl_loss_mean: LossMean | None = opt(None, "how the KL in the loss is averaged (default: as loss_mean)")
    kl_loss_clip: float | None = opt(None, "the KL of a token in the loss is held within 0 and this")
    kl_monitor: list[KLEstimator] = opt(list, "estimates reported beside k1")
    use_adaptive_kl_ctl: bool = opt(False, "adapt the KL coefficient towards adaptive_kl_target")
    adaptive_kl_target: float = opt(6.0, "KL per answer that the controller aims at, in nats")
    adaptive_kl_horizon: float = opt(10000.0, "answers over which the controller acts")
    discount: float = opt(1.0, "gamma of GAE")
    gae_lambda: float = opt(1.0, "lambda of GAE")
    eps_clip: float = opt(0.2, "ratio clip of the actor")
    eps_clip_high: float | None = opt(None, "upper ratio clip (default: eps_clip)")
    policy_loss: PolicyLoss = opt(PolicyLoss.clip, "clip (PPO), sequence_clip (GSPO), cispo, or reinforce (no ratio)")
    loss_mean: LossMean = opt(LossMean.token_mean, "token_mean, seq_mean, seq_sum, or constant (over loss_length)")
    loss_length: float | None = opt(None, "what loss_mean=constant divides sums by (default: gen.max_new_tokens)")
    advantage: Advantage = opt(Advantage.gae, "gae, group (GRPO), rloo, baseline (ReMax), given, or process (steps)")
    group_std: GroupStd = opt(GroupStd.population, "of advantage=group: population, sample, or none (only centred)")
    recompute_logprobs: bool = opt(
        False, "the trainer computes old log-probs itself; the generator's are corrected for"
    )
    behaviour_cap: float = opt(2.0, "with recompute_logprobs: cap of the weights p_trainer / p_generator")
    dynamic_sampling: bool = opt(
        False, "prompts whose answers all have the same reward are not trained on; others are drawn in their place"
    )
    max_redraws: int = opt(8, "with dynamic_sampling: how often a step draws more prompts until its batch is full")
    overlong_buffer: int = opt(0, "answers lose reward over this many last tokens before max_new_tokens")
    overlong_penalty: float = opt(1.0, "what the longest answer loses, with overlong_buffer")
    dense: DenseConfig = opt(DenseConfig, "rewards of steps, where there is a process reward model (prm)")
    value_eps_clip: float = opt(0.2, "clip of the critic around its old values")
    value_loss_type: str = opt("mse", "mse or huber")
    max_reward_clip: float = opt(20.0, "clip of the scaled reward")
    reward_output_scaling: float = opt(1.0, "reward = (score - bias) * scaling")
    reward_output_bias: float = opt(0.0, "reward = (score - bias) * scaling")
    early_stop_imp_ratio: float | None = opt(5.0, "skip a mini-batch whose mean ratio exceeds this")
    early_stop_kl: float | None = opt(None, "skip a mini-batch whose approximate KL exceeds this")
    adv_norm: bool = opt(True, "normalise advantages over the whole batch")
    group_adv_norm: bool = opt(False, "normalise advantages over each prompt's group instead")
    adv_norm_unbiased: bool = opt(False, "adv_norm divides by sqrt(unbiased variance + 1e-8), as VinePPO does")
    value_norm: bool = opt(True, "the critic predicts normalised returns")
    value_norm_type: ValueNormType = opt(ValueNormType.exp, "exp (moving) or ma (all history)")
    value_norm_beta: float = opt(0.99995, "decay of the exp statistics")
    value_norm_eps: float = opt(1e-5, "guard of the statistics")
    ref_ema_eta: float | None = opt(None, "after each step the reference moves by this much towards the actor")
    disable_value: bool = opt(False, "no critic: advantages from returns alone")
    mask_no_eos_with_zero: bool = opt(False, "a truncated answer gets score 0")
    mask_too_long: bool = opt(False, "a truncated answer is not trained on")


@dataclass
class EvaluationConfig:
    """How held-out prompts are answered; lengths, stop tokens and slots are those of ppo.gen."""

    n: int = opt(1, "answers per held-out prompt")
    greedy: bool = opt(True, "take the most likely token")
    top_p: float = opt(1.0, "nucleus mass, in (0, 1]")
    top_k: int = opt(0, "only the k most likely tokens, 0 for all")
    temperature: float = opt(1.0, "divides the logits; 0 means greedy")


@dataclass
class RewardConfig:
    """Where rewards come from when no reward model is used."""

    fn: str = opt("math", "math, code, my_file.py:function (def or async def), format:REGEX, or http://host:port/path")
    fns: list[str] = opt(list, "several of them instead of fn; the reward is their weighted sum")
    weights: list[float] = opt(list, "one number for each of fns (default: 1)")
    timeout: float = opt(10.0, "seconds for one answer; then the judge is killed and the answer counted as failed")
    processes: int = opt(1, "judge processes per worker; for a service, requests at a time")
    in_flight: int = opt(16, "answers at a time in one judge process, where the function is async def")
    right_reward: float = opt(1.0, "score of a right answer (math, code)")
    wrong_reward: float = opt(-1.0, "score of a wrong answer (math, code), and of one whose judge failed")
    format_reward: str = opt("", "regular expression that all of an answer must match to be well formed (math, code)")
    wrong_formatted_reward: float = opt(-0.8, "with format_reward: score of a wrong answer that is well formed")
    right_unformatted_reward: float | None = opt(
        None, "with format_reward: score of a right answer that is not well formed (default: right_reward)"
    )
    retries: int = opt(3, "further tries of a request to a service that fails")
    token_env: str = opt("", "environment variable with the bearer token of a service")
    check_verifier_status: bool = opt(False, "stop the run when every answer of a step is judged wrong")


@dataclass
class VineConfig:
    """How states between an answer's steps are valued (VinePPO)."""

    n_rollouts: int = opt(9, "rollouts from every state")
    splitter: Splitter = opt(Splitter.line, "what a step is: line (GSM8K), or latex (sentences of MATH)")
    max_states: int | None = opt(None, "states of one answer at the most; later ones count as what it came to")


@dataclass
class DatasetConfig:
    path: str = opt("", "file of rows: JSONL, a JSON list, or Parquet")
    max_prompt_len: int = opt(1024, "longest prompt, in tokens")
    max_seqlen: int = opt(2048, "longest prompt and answer together, in tokens (sft, rw)")
    train_bs_n_seqs: int = opt(128, "prompts per step")
    max_pairs_per_prompt: int = opt(2, "pairs drawn per prompt (rw, dpo)")
    max_replies: int = opt(5, "answers drawn per prompt from a ranked list (rw.type=ranked)")
    label_noise: float = opt(0.0, "share of training pairs whose chosen and rejected answers change places, for good")
    eval_path: str = opt("", "file of held-out rows")
    eval_share: float = opt(0.0, "share of the rows of path that is held out")
    split_seed: int = opt(1, "seed of held-out share and label noise, which all members of an ensemble have in common")
    on_bad_row: OnBadRow = opt(OnBadRow.error, "error names the row and stops; skip counts it")
    prompt_template: str = opt("{prompt}", "text around every prompt")
    shuffle: bool = opt(True, "a new seeded order every epoch")

    @property
    def holds_out(self) -> bool:
        """Whether rows are kept for evaluation."""
        return bool(self.eval_path or self.eval_share)


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
    recover_deaths: int = opt(2, "deaths of a worker after which restarts go on without its device (mode=local)")
    recover_allocation: str = opt(
        "", "allocation_mode of restarts with fewer workers (default: as before, or none if that names a plan)"
    )
    devices: list[int] = opt(list, "numbers of the devices that workers have (mode=local on cuda; default: the first)")
    max_staleness: int = opt(0, "steps that rollout may be ahead of training; 0 is on-policy")
    mismatch_limit: float = opt(
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
