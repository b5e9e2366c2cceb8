"""Options of models, of their engines and of the placement of calls."""

from dataclasses import dataclass

from realhf.api.config.choices import Backend, LRSchedule, OptimizerType, Quantization, Recompute
from realhf.api.config.option import (
    COUNT,
    DECAY,
    FILE,
    FRACTION,
    GIGABYTES,
    MODEL,
    NATURAL,
    NON_NEGATIVE,
    POSITIVE,
    SECONDS,
    SWITCH_OR_AUTO,
    ZERO_STAGE,
    opt,
)

GB = 2.0**30


@dataclass
class OptimizerConfig:
    type: OptimizerType = opt(OptimizerType.adam, "adam, or none for a model without updates")
    lr: float = opt(1e-5, "peak learning rate", NON_NEGATIVE)
    weight_decay: float = opt(0.05, "decoupled weight decay, matrices only", NON_NEGATIVE)
    beta1: float = opt(0.9, "Adam beta1", DECAY)
    beta2: float = opt(0.95, "Adam beta2", DECAY)
    eps: float = opt(1e-5, "Adam epsilon", POSITIVE)
    min_lr_ratio: float = opt(0.0, "final learning rate divided by the peak", FRACTION)
    lr_scheduler_type: LRSchedule = opt(LRSchedule.cosine, "learning-rate decay after warmup")
    warmup_steps_proportion: float = opt(0.02, "fraction of all steps with linear warmup", FRACTION)
    gradient_clipping: float = opt(1.0, "maximum global gradient norm, 0 for no clipping", NON_NEGATIVE)
    offload: bool | str = opt(
        False,
        "keep the optimizer state of GPUs in host memory, steps copy it in chunks; auto: the planner decides",
        SWITCH_OR_AUTO,
    )


@dataclass
class LoraOptions:
    rank: int = opt(0, "rank of the adapters, 0 to train all weights", NATURAL)
    alpha: float = opt(32.0, "adapters are scaled by alpha / rank", POSITIVE)
    targets: list[str] = opt(list, "modules with adapters, such as q_proj (default: all but router and head)")
    dropout: float = opt(0.0, "share of the inputs of adapters that are dropped in training", DECAY)
    init_from: str | None = opt(None, "PEFT folder with the first adapters (default: new ones, without effect)", MODEL)
    merge_on_save: bool = opt(False, "save whole models, with merged adapters, instead of PEFT folders")
    quantization: Quantization = opt(
        Quantization.none, "type of the base's attention and MLP matrices: int8 or int4 (extra quantization), or none"
    )
    quantization_group_size: int = opt(
        32, "adjacent weights of a row that share a scale; an even divisor of all rows, in every shard", COUNT
    )


@dataclass
class ModelSpec:
    path: str | None = opt(None, "Hugging Face folder with weights and tokenizer, or ORG/NAME[@revision]", MODEL)
    config: str | None = opt(None, "config.json (or its folder), with init_from_scratch or for `realhf plan`", MODEL)
    tokenizer: str | None = opt(None, "tokenizer folder (default: path)", MODEL)
    init_from_scratch: bool = opt(False, "initialize random weights from config, seeded")
    text_only: bool = opt(False, "use the text part of a multimodal model, and save it alone")
    rotary_length: int = opt(
        0,
        "LongRoPE and dynamic rotary scaling: all rows get the embeddings of rows with so many tokens, the maximum "
        "(default: the length up to which embeddings do not depend on it)",
        NATURAL,
    )
    init_critic_from_actor: bool = opt(False, "replace the vocabulary head of a language model by a new scalar head")
    bf16: bool | str | None = opt(
        None,
        "bfloat16 parameters with float32 master weights; auto: on GPUs, and on CPUs where a measurement at the start "
        "shows that products of this size are faster (default: on GPUs only)",
        SWITCH_OR_AUTO,
    )
    offload: bool = opt(False, "offload the weights to host memory between calls (untrained roles)")
    gradient_checkpointing: bool | str = opt(
        False,
        "recompute activations in the backward pass; auto: the planner chooses none, selective or full",
        SWITCH_OR_AUTO,
    )
    recompute_granularity: Recompute = opt(
        Recompute.full, "with gradient_checkpointing: full recomputes blocks, selective only norms and MLP activations"
    )
    overlap_grad_reduce: bool | None = opt(
        None, "reduce gradients over data-parallel ranks during the backward pass (default: on GPUs)"
    )
    tp_overlap: bool | None = opt(
        None, "overlap tensor-parallel communication with the gradients of weights (default: on GPUs)"
    )
    zero_stage: int | str = opt(
        1,
        "ZeRO: data-parallel ranks share the optimizer state (1), also gradients (2), also weights (3; trained models) "
        "or what the planner chooses (auto: 1 or 3)",
        ZERO_STAGE,
    )
    router_bias_update_rate: float = opt(
        0.0,
        "step of the biases that balance routed experts without a loss, as in DeepSeek-V3 (0: constant)",
        NON_NEGATIVE,
    )
    sequence_parallel: bool = opt(True, "sequence parallelism in training with tensor parallelism")
    backend: Backend = opt(Backend.native, "training backend: native, or megatron on GPUs")
    optimizer: OptimizerConfig = opt(OptimizerConfig, "optimizer")
    lora: LoraOptions = opt(LoraOptions, "LoRA: adapters of frozen weights, which are loaded once per worker")

    @property
    def recompute(self) -> Recompute | None:
        """What the backward pass recomputes; None for nothing, and while the planner has not chosen."""
        return self.recompute_granularity if self.gradient_checkpointing is True else None


@dataclass
class ParallelConfig:
    data_parallel_size: int = opt(1, "data-parallel size", COUNT)
    tensor_parallel_size: int = opt(1, "tensor-parallel size", COUNT)
    pipeline_parallel_size: int = opt(1, "pipeline-parallel size", COUNT)
    expert_parallel_size: int = opt(1, "expert-parallel size, within data and tensor parallelism", COUNT)
    context_parallel_size: int = opt(1, "context-parallel size, which replaces the tensor-parallel size", COUNT)
    virtual_pipeline_parallel_size: int = opt(1, "chunks of layers per pipeline stage (not in generation)", COUNT)


@dataclass
class MicroBatchConfig:
    n_mbs: int = opt(1, "minimum number of micro-batches", COUNT)
    max_tokens_per_mb: int | None = opt(None, "tokens per micro-batch (default: 4096 on CPU, 16384 on GPU)", COUNT)


@dataclass
class VllmConfig:
    python: str | None = opt(None, "Python interpreter with vLLM (default: the current one)", FILE)
    kv_cache_gb: float | None = opt(
        None,
        "KV cache of each engine, on GPUs per device, in GB (default: 1, on GPUs a quarter of the memory)",
        GIGABYTES,
    )
    max_length: int = opt(0, "maximum sequence length in tokens, 0 for the maximum of the model", NATURAL)
    max_num_seqs: int = opt(256, "maximum number of sequences decoded at a time", COUNT)
    pack: bool = opt(True, "on CPU, pack weights for vLLM's kernels: faster decoding, slower weight updates")
    enforce_eager: bool = opt(
        False, "on GPUs, run without CUDA graphs and compilation: a faster start, slower decoding"
    )
    enable_sleep_mode: bool = opt(True, "on GPUs, free vLLM's weights and cache between calls")
    merge_lora: bool = opt(
        False,
        "send merged weights instead of LoRA adapters (always for routed experts, quantized bases and some families)",
    )
    timeout: float = opt(600.0, "timeout of startup, weight updates and generation calls in seconds", SECONDS)

    def kv_cache_bytes(self, device_bytes: float) -> float:
        """Return the size of the KV cache per device; ``device_bytes`` is the memory of a GPU, 0 on a CPU."""
        return self.kv_cache_gb * GB if self.kv_cache_gb is not None else device_bytes / 4 or GB


@dataclass
class MFCConfig:
    device_mesh: str | None = opt(None, "workers, such as node01:0-3 or 0-1 (allocation_mode=manual; default: all)")
    parallel: ParallelConfig = opt(ParallelConfig, "parallel strategy (allocation_mode=manual)")
    mb_spec: MicroBatchConfig = opt(MicroBatchConfig, "micro-batching (any allocation mode)")
    prompts_per_call: int | None = opt(
        None,
        "prompts per call, except for training (default: those of a step); with fewer, calls that read its rows on "
        "other workers start before the last of them exist (any allocation mode)",
        COUNT,
    )
    backend: Backend = opt(Backend.native, "engine of the call: native, or vllm for generation (any allocation mode)")
