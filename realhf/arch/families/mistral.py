"""Mistral: Llama with an optional sliding window in all layers, in Ministral in some of them.

Ministral 3 has YaRN and queries that grow with the position. Mixtral: Mistral with routed experts.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

from realhf.api.model_config import ModelConfig
from realhf.arch.families import llama
from realhf.arch.families.common import base, fields
from realhf.arch.families.common.base import Family
from realhf.arch.families.common.rotary import parameters, rotary

MINISTRAL3_ROTARY: dict[str, Any] = {
    "rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 16384,
    "beta_fast": 32.0, "beta_slow": 1.0, "mscale_all_dim": 1.0, "mscale": 1.0, "llama_4_scaling_beta": 0.1,
}  # fmt: skip
"""The parameters of a configuration without any."""
MIXTRAL_EXPERTS = ("w1.weight", "w3.weight", "w2.weight")


def n_experts(hf: Mapping[str, Any], default: int) -> int:
    """Return the number of experts; Qwen3 drops ``local`` from the field name before transformers 5."""
    value = fields.agreed(hf, "num_experts", "num_local_experts", default=default)
    return fields.whole_number({"num_experts": value}, "num_experts")


def _mistral_from_hf(hf: Mapping[str, Any], scalar_head: bool) -> ModelConfig:
    windows = base.equal_windows(hf, base.sliding_window(hf, 4096))
    return llama.config_from_hf(hf, "mistral", scalar_head, 4096 * 32, n_kv_heads=8, sliding_windows=windows)


def _ministral_from_hf(hf: Mapping[str, Any], scalar_head: bool) -> ModelConfig:
    windows = base.sliding_windows(hf, base.sliding_window(hf, 4096), lambda layer: True)
    return llama.config_from_hf(hf, "ministral", scalar_head, 4096 * 32, n_kv_heads=8, sliding_windows=windows)


def _ministral_to_hf(config: ModelConfig) -> dict[str, Any]:
    return llama.config_to_hf(config, **base.window_by_layer_to_hf(config))


def _ministral3_from_hf(hf: Mapping[str, Any], scalar_head: bool) -> ModelConfig:
    """Read Ministral 3, whose queries grow with the position (the attention temperature of Llama 4)."""
    stored = parameters(hf) or MINISTRAL3_ROTARY
    growth = fields.number(stored, "llama_4_scaling_beta", minimum=0)
    period = fields.whole_number(stored, "original_max_position_embeddings")
    others = ("llama_4_scaling_beta", "max_position_embeddings")
    own = {key: value for key, value in stored.items() if key not in others}
    scaled = {"rope_parameters": own, "rope_theta": hf.get("rope_theta")}
    return llama.config_from_hf(
        hf, "ministral3", scalar_head, 262144, 8, head_dim=128, norm_eps=1e-5,
        read_rotary=lambda n, _: rotary(scaled, n), query_growth=(growth, period),
        sliding_windows=base.equal_windows(hf, base.sliding_window(hf)),
    )  # fmt: skip


def _ministral3_to_hf(config: ModelConfig) -> dict[str, Any]:
    growth, period = config.query_growth
    found = _mistral_to_hf(config)
    own = {"llama_4_scaling_beta": growth, "original_max_position_embeddings": period}
    return found | {"rope_scaling": None, "rope_parameters": found["rope_parameters"] | own}


def _mistral_to_hf(config: ModelConfig) -> dict[str, Any]:
    return llama.config_to_hf(config, **base.sliding_window_to_hf(config))


def _mixtral_from_hf(hf: Mapping[str, Any], scalar_head: bool) -> ModelConfig:
    fields.require(hf, router_jitter_noise=0.0)
    own: dict[str, Any] = {
        "sliding_windows": base.equal_windows(hf, base.sliding_window(hf)),
        "n_experts": n_experts(hf, 8),
        "experts_per_token": fields.whole_number(hf, "num_experts_per_tok", 2),
        "expert_intermediate": fields.whole_number(hf, "intermediate_size"),
        "balance_loss": fields.number(hf, "router_aux_loss_coef", 0.001, minimum=0),
    }
    return llama.config_from_hf(hf, "mixtral", scalar_head, 4096 * 32, 8, norm_eps=1e-5, rotary_base=1e6, **own)


def _mixtral_to_hf(config: ModelConfig) -> dict[str, Any]:
    return _mistral_to_hf(config) | {
        "num_local_experts": config.n_experts,
        "num_experts_per_tok": config.experts_per_token,
        "router_aux_loss_coef": config.balance_loss,
    }


MISTRAL = Family("mistral", "Mistral", _mistral_from_hf, _mistral_to_hf, llama.hf_tensors)
MINISTRAL = Family("ministral", "Ministral", _ministral_from_hf, _ministral_to_hf, llama.hf_tensors)
MINISTRAL3 = Family("ministral3", "Ministral3", _ministral3_from_hf, _ministral3_to_hf, llama.hf_tensors)
MIXTRAL = Family(
    "mixtral", "Mixtral", _mixtral_from_hf, _mixtral_to_hf,
    partial(llama.hf_tensors, routed_mlp="block_sparse_moe", experts=MIXTRAL_EXPERTS),
)  # fmt: skip
