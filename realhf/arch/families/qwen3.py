"""Qwen3: Llama with queries and keys normalised in each head; the upper layers may look back on a window alone."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from realhf.api.model_config import ModelConfig
from realhf.arch.families import llama, qwen2
from realhf.arch.families.base import Family


def _from_hf(hf: Mapping[str, Any], scalar_head: bool) -> ModelConfig:
    sizes = llama.sizes_from_hf(hf, "qwen3", scalar_head, 32768, head_dim=128)
    return replace(llama.with_attention_bias(sizes, hf), qk_norm=True, sliding_windows=qwen2.windows_from_hf(hf))


def _to_hf(config: ModelConfig) -> dict[str, Any]:
    return llama.sizes_to_hf(config) | {"attention_bias": config.qkv_bias} | qwen2.windows_to_hf(config)


QWEN3 = Family(
    name="qwen3",
    hf_architectures=("Qwen3ForCausalLM", "Qwen3ForSequenceClassification"),
    base_prefix="model.",
    config_from_hf=_from_hf,
    config_to_hf=_to_hf,
    hf_tensors=llama.hf_tensors,
    ignored=("rotary_emb.inv_freq",),
)
