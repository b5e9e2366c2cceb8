"""Options of one model and of where one call runs."""

from dataclasses import dataclass

from realhf.api.config.choices import Backend, LRSchedule, OptimizerType
from realhf.api.config.option import opt


@dataclass
class OptimizerConfig:
    type: OptimizerType = opt(OptimizerType.adam, "adam, or empty for a model that is never updated")
    lr: float = opt(1e-5, "peak learning rate")
    weight_decay: float = opt(0.05, "decoupled weight decay, on matrices only")
    beta1: float = opt(0.9, "Adam beta1")
    beta2: float = opt(0.95, "Adam beta2")
    eps: float = opt(1e-5, "Adam epsilon")
    min_lr_ratio: float = opt(0.0, "final learning rate over the peak")
    lr_scheduler_type: LRSchedule = opt(LRSchedule.cosine, "shape of the decay after warm-up")
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
    max_num_seqs: int = opt(256, "rows decoded at a time")
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
