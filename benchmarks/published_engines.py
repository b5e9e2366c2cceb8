"""Traits of the engines behind published figures. They are facts of these engines and not fitted numbers."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from realhf.api.machine import Link
from realhf.plan.machines.engine_traits import EngineTraits, MemoryTraits


@dataclass(frozen=True)
class PublishedEngine:
    """How an engine combines passes into a step; ``gradient_bytes`` are those of a reduced gradient."""

    traits: EngineTraits
    overlaps_data_parallel: bool = True
    gradient_bytes: int = 4


ATTENTION = {"triton-fa1": 0.5, "fa1": 0.6, "fa2": 1.0, "sdpa": 1.0, "cudnn": 1.6}
"""Speed relative to FlashAttention-2: arXiv 2307.08691, section 4.1; cuDNN's kernels on H100: arXiv 2407.08608, 4.1."""
TP_OVERLAP = 0.8  # with NeMo's and nanotron's overlapped tensor parallelism: an assumption
EAGER_LAUNCHES = (42, 111, 45)
"""Of a block without torch.compile: operations of transformers' Llama in bfloat16, counted in a forward pass and in
both passes; a decoding step adds those of the cache."""
VLLM_HOST_ROW = 5.5e-3 / 256
"""Between two steps of 256 rows the GPU waits 5 to 6 ms: https://github.com/vllm-project/vllm/issues/10634"""
# eager modules also start a kernel for each multiplication of a norm and of the rotary embedding
EAGER = EngineTraits(hidden_elements=18.0, head_elements=4.0, mlp_elements=5.0, launches=EAGER_LAUNCHES)
PLAIN = EngineTraits()  # one kernel for a norm, an addition, an activation
COMPILED = EngineTraits(decode_kernels=10)  # torch.compile fuses norms, rotary embedding, activations
MEGATRON_2021 = EngineTraits(score_elements=6.5, hidden_elements=12.0, head_elements=3.0)
"""Scores are stored: masked softmax and dropout are fused kernels, and two products write and read scores."""

ENGINES = {
    "llm-foundry": PublishedEngine(replace(PLAIN, head_elements=1.0, launches=EAGER_LAUNCHES), gradient_bytes=2),
    "fms-fsdp": PublishedEngine(EAGER, gradient_bytes=2),
    "torchtitan": PublishedEngine(EAGER, gradient_bytes=4),
    "nanotron": PublishedEngine(EAGER, overlaps_data_parallel=False, gradient_bytes=4),
    "flash-attn-training": PublishedEngine(replace(COMPILED, launches=EAGER_LAUNCHES), gradient_bytes=2),
    "megatron-2021": PublishedEngine(MEGATRON_2021, overlaps_data_parallel=False),
    "nemo": PublishedEngine(replace(COMPILED, attention=ATTENTION["cudnn"])),
    "faster-transformer": PublishedEngine(replace(COMPILED, launches=(16, 16, 16))),  # launched by C++
    "trt-llm": PublishedEngine(COMPILED),
    "vllm": PublishedEngine(replace(EAGER, decode_kernels=12, host_row=VLLM_HOST_ROW)),
    "sglang": PublishedEngine(replace(EAGER, decode_kernels=12)),
    "gpt-fast": PublishedEngine(COMPILED),
}
TUNED = ("megatron-2021", "nemo", "faster-transformer", "trt-llm")
"""Engines that choose among kernels for each shape, by TransformerEngine, cuBLASLt or their own search."""
BY_SOURCE = {"arXiv 2104": "megatron-2021", "arXiv 2205": "megatron-2021", "dgxc": "nemo", "gpt-fast": "gpt-fast",
             "TensorRT": "trt-llm"}  # fmt: skip


def engine_name(point: Mapping[str, Any]) -> str:
    return point.get("engine") or next(name for key, name in BY_SOURCE.items() if key in point["source"])


def engine_of(point: Mapping[str, Any], tuned: float) -> PublishedEngine:
    """Return the engine of a published point, with the options that were used.

    ``tuned`` is the speed of matrix products that an engine has tuned, relative to torch's.
    """
    engine = ENGINES[engine_name(point)]
    traits = replace(engine.traits, products=tuned if engine_name(point) in TUNED else 1.0)
    if point.get("compiled"):
        traits = replace(COMPILED, attention=traits.attention, decode_kernels=traits.decode_kernels)
    if point.get("attention") in ATTENTION and engine_name(point) != "nemo":
        traits = replace(traits, attention=ATTENTION[point["attention"]])
    if point.get("overlap_tp"):
        traits = replace(traits, tp_overlap=TP_OVERLAP)
    if point.get("cuda_graph") is False:
        traits = replace(traits, captures_decoding=False)
    return replace(engine, traits=traits, overlaps_data_parallel=point.get("overlap_dp", engine.overlaps_data_parallel))


@dataclass(frozen=True)
class PublishedMemory:
    """Bytes of an engine per parameter of a device, and what its published memory includes.

    ``weights``, ``gradients`` and ``optimizer`` are stored between micro-batches; ZeRO-1 shards the last, ZeRO-3 all.
    ``pass_gradients`` exist beside the activations of a micro-batch, as do ``buckets`` without ZeRO. ``reduction`` and
    a share of ``reduced`` are copied to reduce all gradients at once with ZeRO-1, after the passes.
    ``has_reserve``: freed blocks that the allocator keeps are included. ``context`` is the memory of a process outside
    of the allocator, if included. ``balances_head``: the vocabulary head counts as work when blocks are divided among
    stages. ``copies_batched_output``: of micro-batches of several rows, attention's output is saved twice.
    """

    weights: int = 2
    gradients: int = 4
    optimizer: int = 12
    pass_gradients: int = 0
    buckets: int = 0
    reduction: int = 0
    reduced: int = 0
    has_reserve: bool = True
    context: float = 0.0
    balances_head: bool = False
    copies_batched_output: bool = False
    activations: MemoryTraits = MemoryTraits()


MEMORY = {
    # FSDP2: float32 weights are sharded and bfloat16 ones gathered. Logits: bfloat16, float32, log-probabilities.
    # Queries and keys are saved once, rotated. Its figure is torch.cuda.max_memory_reserved
    "torchtitan": PublishedMemory(
        weights=4, optimizer=8, activations=MemoryTraits(saved_queries=2, saved_keys=2, logits_bytes=10)
    ),
    # optim/gradient_accumulator.py: bfloat16 gradients of a pass are added to float32 ones of all weights. trainer.py:
    # DistributedDataParallel without ZeRO. distributed.py, reduce_scatter_coalesced: a copy of all gradients, which
    # torch.distributed.reduce_scatter copies again, and one of the reduced share. tensor_parallel/functional.py:
    # float32 logits, and again minus their maximum. models/llama.py: queries, keys, values and the output are saved
    # once. That the figure is torch.cuda.max_memory_reserved, and that gathered inputs are saved, are assumptions
    "nanotron": PublishedMemory(
        pass_gradients=2, buckets=2, reduction=8, reduced=4, balances_head=True, copies_batched_output=True,
        activations=MemoryTraits(saved_queries=2, saved_keys=2, logits_bytes=8),
    ),
    # multi_gpu_gpt/ParallelGpt.cc and ParallelGptContextDecoder.cc: two and three buffers of the hidden size;
    # attention_layers/GptContextAttentionLayer.cc: eight, and the scores in float16 and float32; the MLP has four.
    # The figure is the memory of the device; that of a context with cuBLAS and NCCL is an assumption
    "faster-transformer": PublishedMemory(
        has_reserve=False, context=1e9, activations=MemoryTraits(workspace_elements=17, score_bytes=6)
    ),
}  # fmt: skip


@dataclass(frozen=True)
class RLEngine:
    """Traits of a system that trains and generates; its rows are packed.

    ``refit`` is the link through which a generating GPU gets new weights. The key/value cache and the weights fill
    ``shared_cache`` of a GPU's memory that training uses as well, or ``separate_cache`` of others. ``logprob_batch``
    rows of maximum length are in a micro-batch of inference, unless a point has another number. ``is_continuous``: with
    rollouts ahead, those of several steps decode together.
    """

    traits: EngineTraits
    refit: Link
    shared_cache: float
    separate_cache: float
    logprob_batch: int
    is_continuous: bool = False


RL_ENGINES = {
    # Megatron-core trains, vLLM generates, rows are in Ray's object store, prompts of max_trajectory_age_steps further
    # steps are sampled meanwhile (docs/guides/async-grpo.md). Shares and batch of log-probabilities:
    # NVIDIA-NeMo/RL examples/configs/grpo_math_1B.yaml and the asynchronous recipes in recipes/llm/performance. A refit
    # of Llama-3.1-8B on eight GPUs takes 5 s in version 0.3: https://github.com/NVIDIA-NeMo/RL/issues/959
    "nemo-rl": RLEngine(replace(ENGINES["nemo"].traits, decode_kernels=12, host_row=VLLM_HOST_ROW, skips_prompts=False),
                        Link(16.1e9 / 5), shared_cache=0.6, separate_cache=0.8, logprob_batch=4, is_continuous=True),
}  # fmt: skip
