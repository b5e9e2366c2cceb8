"""Mistral: Llama whose layers may all look back on a window alone."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from realhf.api.model_config import ModelConfig
from realhf.arch.families import base, llama
from realhf.arch.families.base import Family


def windows_from_hf(hf: Mapping[str, Any], default: int = 0) -> tuple[int, ...]:
    """Return the window of all layers; Mixtral spells it alike."""
    width = base.window(hf, default)
    return (width,) * base.whole_number(hf, "num_hidden_layers") if width else ()


def windows_to_hf(config: ModelConfig) -> dict[str, Any]:
    return {"sliding_window": max(config.sliding_windows, default=0) or None}


def _from_hf(hf: Mapping[str, Any], scalar_head: bool) -> ModelConfig:
    sizes = llama.sizes_from_hf(hf, "mistral", scalar_head, 4096 * 32)
    return replace(sizes, sliding_windows=windows_from_hf(hf, default=4096))


def _to_hf(config: ModelConfig) -> dict[str, Any]:
    return llama.sizes_to_hf(config) | windows_to_hf(config)


MISTRAL = Family(
    name="mistral",
    hf_architectures=("MistralForCausalLM", "MistralForSequenceClassification"),
    base_prefix="model.",
    config_from_hf=_from_hf,
    config_to_hf=_to_hf,
    hf_tensors=llama.hf_tensors,
    ignored=("rotary_emb.inv_freq",),
)
