"""OLMo 2: Llama with norms on the outputs of attention and MLP, and on whole query and key projections."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from realhf.api.model_config import ModelConfig
from realhf.arch.families import llama
from realhf.arch.families.base import Family, HfTensors

NORM_NAMES = {
    "attn_post_norm.weight": "post_attention_layernorm.weight",
    "mlp_post_norm.weight": "post_feedforward_layernorm.weight",
}


def _from_hf(hf: Mapping[str, Any], scalar_head: bool) -> ModelConfig:
    sizes = llama.sizes_from_hf(hf, "olmo2", scalar_head, 2048, norm_eps=1e-5)
    return replace(llama.with_attention_bias(sizes, hf), norm_placement="post", qk_norm="full")


def _to_hf(config: ModelConfig) -> dict[str, Any]:
    return llama.sizes_to_hf(config) | {"attention_bias": config.qkv_bias}


def hf_tensors(config: ModelConfig) -> HfTensors:
    return llama.hf_tensors(config, NORM_NAMES)


OLMO2 = Family("olmo2", "Olmo2", _from_hf, _to_hf, hf_tensors)
