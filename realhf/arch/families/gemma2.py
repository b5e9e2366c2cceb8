"""Gemma 2: Gemma with norms before and after attention and MLP, soft-capped logits, alternating sliding windows."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from realhf.api.model_config import ModelConfig
from realhf.arch.families import base, gemma, llama
from realhf.arch.families.base import Family, HfTensors

NORM_NAMES = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_post_norm.weight": "post_attention_layernorm.weight",
    "mlp_norm.weight": "pre_feedforward_layernorm.weight",
    "mlp_post_norm.weight": "post_feedforward_layernorm.weight",
}


def _from_hf(hf: Mapping[str, Any], scalar_head: bool) -> ModelConfig:
    sizes = gemma.sizes_from_hf(hf, "gemma2", scalar_head, "hidden_activation")
    return replace(
        sizes,
        norm_placement="sandwich",
        sliding_windows=base.sliding_windows(hf, base.sliding_window(hf, 4096), lambda layer: layer % 2 == 0),
        attention_scale=base.number(hf, "query_pre_attn_scalar", 256.0) ** -0.5,
        attention_softcap=base.optional_number(hf, "attn_logit_softcapping", 50.0),
        logit_softcap=base.optional_number(hf, "final_logit_softcapping", 30.0),
    )


def _to_hf(config: ModelConfig) -> dict[str, Any]:
    fields = llama.sizes_to_hf(config)
    scalar = round(config.attention_scale**-2, 6)
    return fields | {
        "attention_bias": config.qkv_bias,
        "hidden_activation": fields["hidden_act"],
        "sliding_window": max(config.sliding_windows, default=0) or None,
        "layer_types": base.layer_types(config),
        "query_pre_attn_scalar": int(scalar) if scalar == int(scalar) else scalar,
        "attn_logit_softcapping": config.attention_softcap or None,
        "final_logit_softcapping": config.logit_softcap or None,
    }


def hf_tensors(config: ModelConfig) -> HfTensors:
    return llama.hf_tensors(config, NORM_NAMES)


GEMMA2 = Family("gemma2", "Gemma2", _from_hf, _to_hf, hf_tensors)
