"""Mistral: Llama with an optional sliding window in all layers. Mixtral: Mistral with routed experts."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from realhf.api.model_config import ModelConfig
from realhf.arch.families import base, fields, llama
from realhf.arch.families.base import Family

MIXTRAL_EXPERTS = ("w1.weight", "w3.weight", "w2.weight")


def n_experts(hf: Mapping[str, Any], default: int) -> int:
    """Return the number of experts; Qwen3 drops ``local`` from the field name before transformers 5."""
    value = fields.agreed(hf, "num_experts", "num_local_experts", default=default)
    return fields.whole_number({"num_experts": value}, "num_experts")


def _mistral_from_hf(hf: Mapping[str, Any], scalar_head: bool) -> ModelConfig:
    windows = base.equal_windows(hf, base.sliding_window(hf, 4096))
    return llama.config_from_hf(hf, "mistral", scalar_head, 4096 * 32, n_kv_heads=8, sliding_windows=windows)


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
MIXTRAL = Family(
    "mixtral", "Mixtral", _mixtral_from_hf, _mixtral_to_hf,
    partial(llama.hf_tensors, routed_mlp="block_sparse_moe", experts=MIXTRAL_EXPERTS),
)  # fmt: skip
