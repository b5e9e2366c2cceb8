"""SmolLM3: Llama with layers that have no rotary embeddings and may have sliding windows instead."""

from collections.abc import Mapping
from typing import Any

from realhf.api.model_config import ModelConfig
from realhf.arch.families import llama
from realhf.arch.families.common import base, fields
from realhf.arch.families.common.base import Family


def _unrotated(hf: Mapping[str, Any]) -> tuple[int, ...]:
    n_layers, step = fields.whole_number(hf, "num_hidden_layers"), fields.whole_number(hf, "no_rope_layer_interval", 4)
    rotated = hf.get("no_rope_layers")
    if rotated is None:
        return tuple(range(step - 1, n_layers, step))
    if not isinstance(rotated, list) or len(rotated) < n_layers or any(value not in (0, 1) for value in rotated):
        raise ValueError(f"field 'no_rope_layers' must have 0 or 1 for {n_layers} layers, got {fields.shown(rotated)}")
    return tuple(layer for layer, value in enumerate(rotated[:n_layers]) if not value)


def _from_hf(hf: Mapping[str, Any], scalar_head: bool) -> ModelConfig:
    unrotated = _unrotated(hf)
    width = base.sliding_window(hf) if fields.flag(hf, "use_sliding_window") else 0
    hf.get("sliding_window")  # without effect if windows are disabled
    own: dict[str, Any] = {
        "mlp_bias": fields.flag(hf, "mlp_bias"),
        "unrotated_layers": unrotated,
        "sliding_windows": base.sliding_windows(hf, width, lambda layer: layer in unrotated),
        **llama.attention_bias(hf),
    }
    return llama.config_from_hf(hf, "smollm3", scalar_head, 32768, 4, rotary_base=2e6, tied=True, **own)


def _to_hf(config: ModelConfig) -> dict[str, Any]:
    return llama.config_to_hf(config) | {
        **base.sliding_window_to_hf(config),
        "use_sliding_window": bool(config.sliding_windows),
        "layer_types": base.layer_types(config),
        "no_rope_layers": [int(layer not in config.unrotated_layers) for layer in range(config.n_layers)],
        "attention_bias": config.qkv_bias,
        "mlp_bias": config.mlp_bias,
    }


SMOLLM3 = Family("smollm3", "SmolLM3", _from_hf, _to_hf, llama.hf_tensors, unused=frozenset({"max_window_layers"}))
