"""Mixtral: Mistral with routed experts; the expert weights of a token sum to one."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from realhf.api.model_config import ModelConfig
from realhf.arch.families import base, llama, mistral
from realhf.arch.families.base import Family, HfTensors


def n_experts(hf: Mapping[str, Any], default: int) -> int:
    """Return the number of experts; Qwen3 drops ``local`` from the field name before transformers 5."""
    return base.whole_number(hf, "num_experts" if hf.get("num_experts") is not None else "num_local_experts", default)


def _from_hf(hf: Mapping[str, Any], scalar_head: bool) -> ModelConfig:
    base.require(hf, router_jitter_noise=0.0)
    sizes = llama.sizes_from_hf(hf, "mixtral", scalar_head, 4096 * 32, norm_eps=1e-5, rotary_base=1e6)
    return replace(
        sizes,
        sliding_windows=mistral.sliding_windows_from_hf(hf),
        n_experts=n_experts(hf, 8),
        experts_per_token=base.whole_number(hf, "num_experts_per_tok", 2),
        expert_intermediate=sizes.intermediate,
        balance_loss=base.number(hf, "router_aux_loss_coef", 0.001, minimum=0),
    )


def _to_hf(config: ModelConfig) -> dict[str, Any]:
    return llama.sizes_to_hf(config) | {
        **mistral.sliding_windows_to_hf(config),
        "num_local_experts": config.n_experts,
        "num_experts_per_tok": config.experts_per_token,
        "router_aux_loss_coef": config.balance_loss,
    }


def hf_tensors(config: ModelConfig) -> HfTensors:
    return llama.routed_tensors(config, "block_sparse_moe", ("w1.weight", "w3.weight", "w2.weight"))


MIXTRAL = Family("mixtral", "Mixtral", _from_hf, _to_hf, hf_tensors)
