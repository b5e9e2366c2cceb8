"""Traits of the engines behind published times, by source. They are facts of these engines, not fitted numbers."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from realhf.plan.cost.engine_traits import EngineTraits


@dataclass(frozen=True)
class PublishedEngine:
    """How an engine combines passes into a step; ``gradient_bytes`` are those of a reduced gradient."""

    traits: EngineTraits
    overlaps_data_parallel: bool = True
    gradient_bytes: int = 4


LLM_FOUNDRY = {  # eager modules: no fused additions; FlashAttention 1 in Triton, which the paper of FlashAttention-2
    # measures at about half of FlashAttention-2 on an A100 (arXiv 2307.08691, section 4.1)
    hardware: PublishedEngine(EngineTraits(attention=0.5, hidden_elements=18.0), gradient_bytes=2)
    for hardware in ("a100-80g", "h100")
}
MEGATRON_2021 = PublishedEngine(  # stores scores: masked softmax (read, write) and dropout (read, write, mask) are
    # fused; two products write and read scores; gradients are reduced after the last micro-batch
    EngineTraits(score_elements=6.5, hidden_elements=12.0, head_elements=3.0), overlaps_data_parallel=False,
)  # fmt: skip
NEMO = PublishedEngine(
    EngineTraits(attention=1.6, tp_overlap=0.8)
)  # cuDNN's FlashAttention-3 kernels; overlap by option
COMPILED = PublishedEngine(EngineTraits(decode_kernels=10))  # torch.compile fuses norms, rotary embedding, activation
TRT_LLM = PublishedEngine(EngineTraits(decode_kernels=10))


def engine_of(point: Mapping[str, Any]) -> PublishedEngine:
    """Return the engine of a published point."""
    source = point["source"]
    if "llm-foundry" in source:
        return LLM_FOUNDRY[point["hardware"]]
    if "arXiv 2104" in source or "arXiv 2205" in source:
        return MEGATRON_2021
    if "dgxc" in source:
        return NEMO
    return TRT_LLM if "TensorRT" in source else COMPILED
