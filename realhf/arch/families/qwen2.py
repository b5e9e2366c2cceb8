"""Qwen2 and Qwen2.5: Llama with biases on query, key and value; the upper layers may look back on a window alone."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from realhf.api.model_config import ModelConfig
from realhf.arch.families import base, llama
from realhf.arch.families.base import Family


def windows_from_hf(hf: Mapping[str, Any]) -> tuple[int, ...]:
    """Return each layer's window; Qwen3 spells it alike."""
    if not hf.get("use_sliding_window", False):
        return ()
    n_full = int(base.number(hf, "max_window_layers", 28, least=0))
    return base.windows_by_layer(hf, base.window(hf, 4096), lambda layer: layer >= n_full)


def windows_to_hf(config: ModelConfig) -> dict[str, Any]:
    """The inverse of ``windows_from_hf``; versions without ``layer_types`` know windows from some layer upwards."""
    kinds = base.layer_types(config)
    return {
        "use_sliding_window": bool(config.sliding_windows),
        "sliding_window": max(config.sliding_windows, default=0) or None,
        "max_window_layers": kinds.index("sliding_attention") if config.sliding_windows else config.n_layers,
        "layer_types": kinds,
    }


def _from_hf(hf: Mapping[str, Any], scalar_head: bool) -> ModelConfig:
    sizes = llama.sizes_from_hf(hf, "qwen2", scalar_head, 32768)
    return replace(sizes, qkv_bias=True, sliding_windows=windows_from_hf(hf))


def _to_hf(config: ModelConfig) -> dict[str, Any]:
    return llama.sizes_to_hf(config) | windows_to_hf(config)


QWEN2 = Family(
    name="qwen2",
    hf_architectures=("Qwen2ForCausalLM", "Qwen2ForSequenceClassification"),
    base_prefix="model.",
    config_from_hf=_from_hf,
    config_to_hf=_to_hf,
    hf_tensors=llama.hf_tensors,
    ignored=("rotary_emb.inv_freq",),
)
