"""Qwen2, Qwen2.5 and Qwen3: Llama with optional sliding windows. Their MoE versions have routed experts in some layers.

Those of Qwen2-MoE are beside a shared one, which is weighted by a gate.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

from realhf.api.model_config import ModelConfig
from realhf.arch.families import llama, mistral
from realhf.arch.families.common import base, fields
from realhf.arch.families.common.base import Family


def _sliding_windows_from_hf(hf: Mapping[str, Any]) -> tuple[int, ...]:
    n_full = fields.number(hf, "max_window_layers", 28, minimum=0)
    return base.sliding_windows(hf, _sliding_window(hf), lambda layer: layer >= n_full)


def _sliding_window(hf: Mapping[str, Any]) -> int:
    hf.get("sliding_window")  # without effect if windows are disabled
    return base.sliding_window(hf, 4096) if fields.flag(hf, "use_sliding_window") else 0


def _sliding_windows_to_hf(config: ModelConfig) -> dict[str, Any]:
    kinds = base.layer_types(config)
    return {
        "use_sliding_window": bool(config.sliding_windows),
        **base.sliding_window_to_hf(config),
        # versions without layer_types read this
        "max_window_layers": kinds.index("sliding_attention") if config.sliding_windows else config.n_layers,
        "layer_types": kinds,
    }


def _qwen2_from_hf(hf: Mapping[str, Any], scalar_head: bool) -> ModelConfig:
    windows = _sliding_windows_from_hf(hf)
    return llama.config_from_hf(hf, "qwen2", scalar_head, 32768, 32, qkv_bias=True, sliding_windows=windows)


def _qwen2_to_hf(config: ModelConfig) -> dict[str, Any]:
    return llama.config_to_hf(config, **_sliding_windows_to_hf(config))


def _qwen3_from_hf(hf: Mapping[str, Any], scalar_head: bool) -> ModelConfig:
    own: dict[str, Any] = {"sliding_windows": _sliding_windows_from_hf(hf), **llama.attention_bias(hf)}
    return llama.config_from_hf(hf, "qwen3", scalar_head, 32768, 32, head_dim=128, qk_norm="head", **own)


def _qwen3_to_hf(config: ModelConfig) -> dict[str, Any]:
    return llama.config_to_hf(config, attention_bias=config.qkv_bias, **_sliding_windows_to_hf(config))


def dense_layers(hf: Mapping[str, Any]) -> tuple[int, ...]:
    n_layers, step = fields.whole_number(hf, "num_hidden_layers"), fields.whole_number(hf, "decoder_sparse_step", 1)
    dense = {*fields.token_ids(hf, "mlp_only_layers"), *(i for i in range(n_layers) if (i + 1) % step)}
    return tuple(sorted(i for i in dense if 0 <= i < n_layers))


def _qwen2_moe_from_hf(hf: Mapping[str, Any], scalar_head: bool) -> ModelConfig:
    """Read Qwen2-MoE without windows: versions differ in the layers that have them."""
    fields.require(hf, use_sliding_window=False)
    hf.get("sliding_window")  # without effect
    own: dict[str, Any] = {
        "qkv_bias": fields.flag(hf, "qkv_bias", True),
        "n_experts": mistral.n_experts(hf, 60),
        "experts_per_token": fields.whole_number(hf, "num_experts_per_tok", 4),
        "expert_intermediate": fields.whole_number(hf, "moe_intermediate_size", 1408),
        "shared_intermediate": fields.whole_number(hf, "shared_expert_intermediate_size", 5632),
        "shared_gate": True,
        "dense_layers": dense_layers(hf),
        "renormalise_experts": fields.flag(hf, "norm_topk_prob"),
        "balance_loss": fields.number(hf, "router_aux_loss_coef", 0.001, minimum=0),
    }
    return llama.config_from_hf(hf, "qwen2_moe", scalar_head, 32768, 16, **own)


def _qwen2_moe_to_hf(config: ModelConfig) -> dict[str, Any]:
    own = {"qkv_bias": config.qkv_bias, "shared_expert_intermediate_size": config.shared_intermediate}
    return llama.config_to_hf(config) | routed_to_hf(config) | own


def routed_to_hf(config: ModelConfig) -> dict[str, Any]:
    return {
        "num_experts": config.n_experts,
        "num_experts_per_tok": config.experts_per_token,
        "moe_intermediate_size": config.expert_intermediate,
        "decoder_sparse_step": 1,
        "mlp_only_layers": list(config.dense_layers),
        "norm_topk_prob": config.renormalise_experts,
        "router_aux_loss_coef": config.balance_loss,
    }


def _qwen3_moe_from_hf(hf: Mapping[str, Any], scalar_head: bool) -> ModelConfig:
    width = _sliding_window(hf)
    if width:
        fields.require(hf, max_window_layers=0)  # layers without a window, in transformers before 4.52
    own: dict[str, Any] = {
        "qk_norm": "head",
        "sliding_windows": base.equal_windows(hf, width),
        "n_experts": mistral.n_experts(hf, 128),
        "experts_per_token": fields.whole_number(hf, "num_experts_per_tok", 8),
        "expert_intermediate": fields.whole_number(hf, "moe_intermediate_size", 768),
        "dense_layers": dense_layers(hf),
        "renormalise_experts": fields.flag(hf, "norm_topk_prob"),
        "balance_loss": fields.number(hf, "router_aux_loss_coef", 0.001, minimum=0),
        **llama.attention_bias(hf),
    }
    return llama.config_from_hf(hf, "qwen3_moe", scalar_head, 32768, 4, **own)


def _qwen3_moe_to_hf(config: ModelConfig) -> dict[str, Any]:
    return llama.config_to_hf(config) | {
        **base.sliding_window_to_hf(config),
        "use_sliding_window": bool(config.sliding_windows),
        "attention_bias": config.qkv_bias,
        **routed_to_hf(config),
    }


QWEN2 = Family("qwen2", "Qwen2", _qwen2_from_hf, _qwen2_to_hf, llama.hf_tensors)
QWEN3 = Family("qwen3", "Qwen3", _qwen3_from_hf, _qwen3_to_hf, llama.hf_tensors)
QWEN2_MOE = Family(
    "qwen2_moe",
    "Qwen2Moe",
    _qwen2_moe_from_hf,
    _qwen2_moe_to_hf,
    partial(llama.hf_tensors, routed_mlp="mlp", shared="shared_expert"),
    unused=frozenset({"max_window_layers"}),
)
QWEN3_MOE = Family(
    "qwen3_moe",
    "Qwen3Moe",
    _qwen3_moe_from_hf,
    _qwen3_moe_to_hf,
    partial(llama.hf_tensors, routed_mlp="mlp"),
    unused=frozenset({"max_window_layers"}),
)
