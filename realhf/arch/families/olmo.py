"""OLMo 2 and 3: Llama with norms on outputs and on whole projections. OLMo 3 has sliding windows in most layers.

OLMoE: Llama with norms on whole projections and routed experts.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

from realhf.api.model_config import ModelConfig
from realhf.arch.families import llama
from realhf.arch.families.common import base, fields
from realhf.arch.families.common.base import Family
from realhf.arch.families.common.rotary import rotary_by_layer_type, rotary_by_layer_type_to_hf
from realhf.arch.families.mistral import n_experts

NORM_NAMES = {
    "attn_post_norm.weight": "post_attention_layernorm.weight",
    "mlp_post_norm.weight": "post_feedforward_layernorm.weight",
}


def _olmo2_from_hf(hf: Mapping[str, Any], scalar_head: bool) -> ModelConfig:
    own: dict[str, Any] = {"norm_placement": "post", "qk_norm": "full", **llama.attention_bias(hf)}
    return llama.config_from_hf(hf, "olmo2", scalar_head, 2048, norm_eps=1e-5, **own)


def _olmo2_to_hf(config: ModelConfig) -> dict[str, Any]:
    return llama.config_to_hf(config, attention_bias=config.qkv_bias)


def _olmo3_from_hf(hf: Mapping[str, Any], scalar_head: bool) -> ModelConfig:
    own: dict[str, Any] = {
        "norm_placement": "post",
        "qk_norm": "full",
        "sliding_windows": base.all_but_every(4, hf, base.sliding_window(hf, 4096)),
        **llama.attention_bias(hf),
    }
    read_rotary = lambda n, _: rotary_by_layer_type(hf, n, 5e5, 5e5)
    return llama.config_from_hf(hf, "olmo3", scalar_head, 2048, norm_eps=1e-5, read_rotary=read_rotary, **own)


def _olmo3_to_hf(config: ModelConfig) -> dict[str, Any]:
    return _olmo2_to_hf(config) | {
        **base.window_by_layer_to_hf(config),
        **rotary_by_layer_type_to_hf(config),
    }


def _olmoe_from_hf(hf: Mapping[str, Any], scalar_head: bool) -> ModelConfig:
    fields.require(hf, clip_qkv=None)
    own: dict[str, Any] = {
        "qk_norm": "full",
        "n_experts": n_experts(hf, 64),
        "experts_per_token": fields.whole_number(hf, "num_experts_per_tok", 8),
        "expert_intermediate": fields.whole_number(hf, "intermediate_size"),
        "renormalise_experts": fields.flag(hf, "norm_topk_prob"),
        "balance_loss": fields.number(hf, "router_aux_loss_coef", 0.01, minimum=0),
        **llama.attention_bias(hf),
    }
    return llama.config_from_hf(hf, "olmoe", scalar_head, 4096, norm_eps=1e-5, **own)


def _olmoe_to_hf(config: ModelConfig) -> dict[str, Any]:
    return _olmo2_to_hf(config) | {
        "num_experts": config.n_experts,
        "num_experts_per_tok": config.experts_per_token,
        "norm_topk_prob": config.renormalise_experts,
        "router_aux_loss_coef": config.balance_loss,
    }


TENSORS = partial(llama.hf_tensors, norms=NORM_NAMES)
OLMO2 = Family("olmo2", "Olmo2", _olmo2_from_hf, _olmo2_to_hf, TENSORS)
OLMO3 = Family("olmo3", "Olmo3", _olmo3_from_hf, _olmo3_to_hf, TENSORS)
OLMOE = Family("olmoe", "Olmoe", _olmoe_from_hf, _olmoe_to_hf, partial(llama.hf_tensors, routed_mlp="mlp"))
