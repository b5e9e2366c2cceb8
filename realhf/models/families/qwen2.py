"""Qwen2 and Qwen2.5: Llama with biases on query, key and value."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from realhf.api.model import ModelConfig
from realhf.models.families import base, llama
from realhf.models.families.base import Family


def _from_hf(hf: Mapping[str, Any], scalar_head: bool) -> ModelConfig:
    base.refuse(hf, use_sliding_window=False)
    return replace(llama.sizes_from_hf(hf, "qwen2", scalar_head, 32768), qkv_bias=True)


def _to_hf(config: ModelConfig) -> dict[str, Any]:
    return llama.sizes_to_hf(config) | {"use_sliding_window": False, "sliding_window": None}


QWEN2 = Family(
    name="qwen2",
    hf_architectures=("Qwen2ForCausalLM", "Qwen2ForSequenceClassification"),
    base_prefix="model.",
    config_from_hf=_from_hf,
    config_to_hf=_to_hf,
    hf_tensors=llama.hf_tensors,
    ignored=("rotary_emb.inv_freq",),
)
