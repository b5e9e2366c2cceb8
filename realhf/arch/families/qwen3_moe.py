"""Qwen3-MoE: Qwen3 with routed experts in some or all layers."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from realhf.api.model_config import ModelConfig
from realhf.arch.families import base, llama, mistral, mixtral
from realhf.arch.families.base import Family, HfTensors


def _from_hf(hf: Mapping[str, Any], scalar_head: bool) -> ModelConfig:
    sizes = llama.with_attention_bias(llama.sizes_from_hf(hf, "qwen3_moe", scalar_head, 32768), hf)
    step = base.whole_number(hf, "decoder_sparse_step", 1)
    dense = set(hf.get("mlp_only_layers") or ()) | {i for i in range(sizes.n_layers) if (i + 1) % step}
    return replace(
        sizes,
        qk_norm="head",
        sliding_windows=mistral.sliding_windows_from_hf(hf, 4096) if hf.get("use_sliding_window", False) else (),
        n_experts=mixtral.n_experts(hf, 128),
        experts_per_token=base.whole_number(hf, "num_experts_per_tok", 8),
        expert_intermediate=base.whole_number(hf, "moe_intermediate_size", 768),
        dense_layers=tuple(sorted(i for i in dense if i < sizes.n_layers)),
        renormalise_experts=bool(hf.get("norm_topk_prob", False)),
        balance_loss=base.number(hf, "router_aux_loss_coef", 0.001, minimum=0),
    )


def _to_hf(config: ModelConfig) -> dict[str, Any]:
    return llama.sizes_to_hf(config) | {
        **mistral.sliding_windows_to_hf(config),
        "use_sliding_window": bool(config.sliding_windows),
        "attention_bias": config.qkv_bias,
        "num_experts": config.n_experts,
        "num_experts_per_tok": config.experts_per_token,
        "moe_intermediate_size": config.expert_intermediate,
        "decoder_sparse_step": 1,
        "mlp_only_layers": list(config.dense_layers),
        "norm_topk_prob": config.renormalise_experts,
        "router_aux_loss_coef": config.balance_loss,
    }


def hf_tensors(config: ModelConfig) -> HfTensors:
    return llama.routed_tensors(config, "mlp", ("gate_proj.weight", "up_proj.weight", "down_proj.weight"))


QWEN3_MOE = Family("qwen3_moe", "Qwen3Moe", _from_hf, _to_hf, hf_tensors)
