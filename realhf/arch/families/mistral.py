"""Mistral: Llama with an optional sliding window in all layers."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from realhf.api.model_config import ModelConfig
from realhf.arch.families import base, llama
from realhf.arch.families.base import Family


def sliding_windows_from_hf(hf: Mapping[str, Any], default: int = 0) -> tuple[int, ...]:
    """Return the window of each layer, which is the same for all; also for Mixtral."""
    width = base.sliding_window(hf, default)
    return (width,) * base.whole_number(hf, "num_hidden_layers") if width else ()


def sliding_windows_to_hf(config: ModelConfig) -> dict[str, Any]:
    return {"sliding_window": max(config.sliding_windows, default=0) or None}


def _from_hf(hf: Mapping[str, Any], scalar_head: bool) -> ModelConfig:
    sizes = llama.sizes_from_hf(hf, "mistral", scalar_head, 4096 * 32)
    return replace(sizes, sliding_windows=sliding_windows_from_hf(hf, default=4096))


def _to_hf(config: ModelConfig) -> dict[str, Any]:
    return llama.sizes_to_hf(config) | sliding_windows_to_hf(config)


MISTRAL = Family("mistral", "Mistral", _from_hf, _to_hf, llama.hf_tensors)
