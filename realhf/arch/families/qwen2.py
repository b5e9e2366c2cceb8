"""Qwen2 and Qwen2.5: Llama with query, key and value biases, and optional sliding windows in the upper layers."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from realhf.api.model_config import ModelConfig
from realhf.arch.families import base, llama
from realhf.arch.families.base import Family


def sliding_windows_from_hf(hf: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the window of each layer; also for Qwen3."""
    if not hf.get("use_sliding_window", False):
        return ()
    n_full = int(base.number(hf, "max_window_layers", 28, minimum=0))
    return base.sliding_windows(hf, base.sliding_window(hf, 4096), lambda layer: layer >= n_full)


def sliding_windows_to_hf(config: ModelConfig) -> dict[str, Any]:
    """The inverse of ``sliding_windows_from_hf``; versions without ``layer_types`` read ``max_window_layers``."""
    kinds = base.layer_types(config)
    return {
        "use_sliding_window": bool(config.sliding_windows),
        "sliding_window": max(config.sliding_windows, default=0) or None,
        "max_window_layers": kinds.index("sliding_attention") if config.sliding_windows else config.n_layers,
        "layer_types": kinds,
    }


def _from_hf(hf: Mapping[str, Any], scalar_head: bool) -> ModelConfig:
    sizes = llama.sizes_from_hf(hf, "qwen2", scalar_head, 32768)
    return replace(sizes, qkv_bias=True, sliding_windows=sliding_windows_from_hf(hf))


def _to_hf(config: ModelConfig) -> dict[str, Any]:
    return llama.sizes_to_hf(config) | sliding_windows_to_hf(config)


QWEN2 = Family("qwen2", "Qwen2", _from_hf, _to_hf, llama.hf_tensors)
