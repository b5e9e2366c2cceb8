"""Qwen3: Llama with per-head norms of queries and keys, and optional sliding windows in the upper layers."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from realhf.api.model_config import ModelConfig
from realhf.arch.families import llama, qwen2
from realhf.arch.families.base import Family


def _from_hf(hf: Mapping[str, Any], scalar_head: bool) -> ModelConfig:
    sizes = llama.sizes_from_hf(hf, "qwen3", scalar_head, 32768, head_dim=128)
    windows = qwen2.sliding_windows_from_hf(hf)
    return replace(llama.with_attention_bias(sizes, hf), qk_norm="head", sliding_windows=windows)


def _to_hf(config: ModelConfig) -> dict[str, Any]:
    return llama.sizes_to_hf(config) | {"attention_bias": config.qkv_bias} | qwen2.sliding_windows_to_hf(config)


QWEN3 = Family("qwen3", "Qwen3", _from_hf, _to_hf, llama.hf_tensors)
