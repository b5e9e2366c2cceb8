"""Granite: Llama with multipliers of embeddings, attention scores, residual additions and logits."""

from collections.abc import Mapping
from typing import Any

from realhf.api.model_config import ModelConfig
from realhf.arch.families import llama
from realhf.arch.families.common import fields
from realhf.arch.families.common.base import Family


def _from_hf(hf: Mapping[str, Any], scalar_head: bool) -> ModelConfig:
    own: dict[str, Any] = {
        "mlp_bias": fields.flag(hf, "mlp_bias"),
        "embedding_scale": fields.number(hf, "embedding_multiplier", 1.0),
        "attention_scale": fields.number(hf, "attention_multiplier", 1.0),
        "residual_scale": fields.number(hf, "residual_multiplier", 1.0),
        "logit_scale": 1 / fields.number(hf, "logits_scaling", 1.0),
        **llama.attention_bias(hf),
    }
    return llama.config_from_hf(hf, "granite", scalar_head, 2048, **own)


def _to_hf(config: ModelConfig) -> dict[str, Any]:
    return llama.config_to_hf(config) | {
        "attention_bias": config.qkv_bias,
        "mlp_bias": config.mlp_bias,
        "embedding_multiplier": config.embedding_scale,
        "attention_multiplier": config.attention_scale,
        "residual_multiplier": config.residual_scale,
        "logits_scaling": 1 / config.logit_scale,
    }


GRANITE = Family("granite", "Granite", _from_hf, _to_hf, llama.hf_tensors)
