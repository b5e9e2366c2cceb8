"""Seed-OSS: Llama whose attention has biases on queries, keys and values."""

from collections.abc import Mapping
from typing import Any

from realhf.api.model_config import ModelConfig
from realhf.arch.families import llama
from realhf.arch.families.common import fields
from realhf.arch.families.common.base import Family


def _from_hf(hf: Mapping[str, Any], scalar_head: bool) -> ModelConfig:
    biases = {"qkv_bias": fields.flag(hf, "attention_bias", True), "proj_bias": fields.flag(hf, "attention_out_bias")}
    own: dict[str, Any] = {"mlp_bias": fields.flag(hf, "mlp_bias"), **biases}
    head_dim = None if "head_dim" in hf else 128  # null: the hidden size divided by the heads
    return llama.config_from_hf(hf, "seed_oss", scalar_head, 524288, 8, head_dim=head_dim, **own)


def _to_hf(config: ModelConfig) -> dict[str, Any]:
    return llama.config_to_hf(config) | {
        "attention_bias": config.qkv_bias,
        "attention_out_bias": config.proj_bias,
        "mlp_bias": config.mlp_bias,
    }


SEED_OSS = Family("seed_oss", "SeedOss", _from_hf, _to_hf, llama.hf_tensors, unused=frozenset({"residual_dropout"}))
