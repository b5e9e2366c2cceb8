"""Traits of the engines behind published times. They are facts of these engines and not fitted numbers."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from realhf.plan.machines.engine_traits import EngineTraits


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
    "vllm": PublishedEngine(replace(EAGER, decode_kernels=12)),
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
