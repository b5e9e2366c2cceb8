"""GLM-4: Llama with partial rotary embeddings of adjacent dimensions. GLM-4-0414 has norms on outputs too.

GLM-4.5 has routed experts, and rotary embeddings as Llama.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

from realhf.api.model_config import ModelConfig
from realhf.arch.families import llama
from realhf.arch.families.common import fields, routing
from realhf.arch.families.common.base import Family, HfTensors
from realhf.arch.families.common.rotary import partial_rotary, partial_rotary_to_hf

GLM4_NORM_NAMES = {
    **llama.NORM_NAMES,
    "attn_post_norm.weight": "post_self_attn_layernorm.weight",
    "mlp_post_norm.weight": "post_mlp_layernorm.weight",
}


def _from_hf(hf: Mapping[str, Any], scalar_head: bool, family: str, norm_placement: str) -> ModelConfig:
    own: dict[str, Any] = {
        "norm_placement": norm_placement,
        "qkv_bias": fields.flag(hf, "attention_bias", True),
        "read_rotary": lambda n, head_dim: partial_rotary(hf, n, head_dim, 0.5),
    }
    return llama.config_from_hf(hf, family, scalar_head, 131072, 2, head_dim=128, norm_eps=1.5625e-7, **own)


def _to_hf(config: ModelConfig) -> dict[str, Any]:
    return llama.config_to_hf(config, attention_bias=config.qkv_bias) | partial_rotary_to_hf(config)


def _tensors(config: ModelConfig, norms: Mapping[str, str]) -> HfTensors:
    return llama.hf_tensors(config, norms, own={**llama.interleaved(config), **llama.fused_mlp(config)})


def _glm4_moe_from_hf(hf: Mapping[str, Any], scalar_head: bool) -> ModelConfig:
    own: dict[str, Any] = {
        "qkv_bias": fields.flag(hf, "attention_bias"),
        "qk_norm": "head" if fields.flag(hf, "use_qk_norm") else "none",
        "read_rotary": lambda n, head_dim: partial_rotary(hf, n, head_dim, 0.5),
        **routing.from_hf(hf, n_experts=128, intermediate=1408, groups=(1, 1), n_dense=1, scale=1.0),
    }
    head_dim = fields.whole_number(hf, "hidden_size") // fields.whole_number(hf, "num_attention_heads")
    return llama.config_from_hf(hf, "glm4_moe", scalar_head, 131072, 8, head_dim=head_dim, norm_eps=1e-5, **own)


def _glm4_moe_to_hf(config: ModelConfig) -> dict[str, Any]:
    return _to_hf(config) | {"use_qk_norm": config.qk_norm == "head", **routing.to_hf(config)}


GLM = Family(
    "glm", "Glm", partial(_from_hf, family="glm", norm_placement="pre"), _to_hf,
    partial(_tensors, norms=llama.NORM_NAMES),
)  # fmt: skip
GLM4 = Family(
    "glm4", "Glm4", partial(_from_hf, family="glm4", norm_placement="sandwich"), _to_hf,
    partial(_tensors, norms=GLM4_NORM_NAMES),
)  # fmt: skip
GLM4_MOE = Family(
    "glm4_moe", "Glm4Moe", _glm4_moe_from_hf, _glm4_moe_to_hf, partial(llama.hf_tensors, routed_mlp="mlp"),
    extra_layers=True,
)  # fmt: skip
