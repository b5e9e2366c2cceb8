"""gpt-oss: attention sinks, windows in every second layer, and routed experts with biases and a clamped SwiGLU."""

from collections.abc import Mapping
from typing import Any

from realhf.api.model_config import ModelConfig
from realhf.arch.families import llama
from realhf.arch.families.common import base, fields
from realhf.arch.families.common.base import Family, HfTensor, HfTensors
from realhf.arch.families.common.rotary import parameters, rotary
from realhf.arch.families.mistral import n_experts

ROTARY: dict[str, Any] = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 4096,
}  # fmt: skip
"""The parameters of a configuration without any."""


def _from_hf(hf: Mapping[str, Any], scalar_head: bool) -> ModelConfig:
    fields.require(hf, hidden_act="silu", swiglu_alpha=1.702, swiglu_limit=7.0)
    top_k = fields.agreed(hf, "num_experts_per_tok", "experts_per_token", default=4)
    hf.get("initial_context_length")  # also in the rotary parameters
    stored = fields.replaced(hf, rope_parameters=parameters(hf) or ROTARY, rope_scaling=None)
    own: dict[str, Any] = {
        "activation": "clamped_swiglu",
        "attention_sinks": True,
        "expert_bias": True,
        "sliding_windows": base.sliding_windows(hf, base.sliding_window(hf, 128), lambda layer: layer % 2 == 0),
        "n_experts": n_experts(hf, 128),
        "experts_per_token": fields.whole_number({"num_experts_per_tok": top_k}, "num_experts_per_tok"),
        "expert_intermediate": fields.whole_number(hf, "intermediate_size"),
        "balance_loss": fields.number(hf, "router_aux_loss_coef", 0.001, minimum=0),
        "qkv_bias": (bias := fields.flag(hf, "attention_bias", True)),
        "proj_bias": bias,
        "read_rotary": lambda n, _: rotary(stored, n, 150000.0),
    }
    return llama.config_from_hf(hf, "gpt_oss", scalar_head, 131072, 8, head_dim=64, norm_eps=1e-5, **own)


def _to_hf(config: ModelConfig) -> dict[str, Any]:
    return llama.config_to_hf(config) | {
        **base.window_by_layer_to_hf(config),
        "hidden_act": "silu",
        "intermediate_size": config.expert_intermediate,
        "num_local_experts": config.n_experts,
        "num_experts_per_tok": config.experts_per_token,
        "router_aux_loss_coef": config.balance_loss,
        "attention_bias": config.qkv_bias,
    }


def _experts(config: ModelConfig) -> HfTensors:
    """Return the stacked experts: gate and up are the even and odd columns of one matrix ``[E, D, 2 * wide]``."""
    count, hidden, wide = ((0, n) for n in (config.n_experts, config.hidden, config.expert_intermediate))
    parts = [((part, part + 1), (part, 2 * config.expert_intermediate)) for part in (0, 1)]
    name = "mlp.experts"
    return {
        "router": (HfTensor("mlp.router.weight"),),
        "b_router": (HfTensor("mlp.router.bias"),),
        "experts.up": tuple(
            HfTensor(f"{name}.gate_up_proj", (count, hidden, columns), (count, ours, wide, hidden), (0, 3, 2), 2, 2)
            for ours, columns in parts
        ),
        "experts.b_up": tuple(
            HfTensor(f"{name}.gate_up_proj_bias", (count, columns), (count, ours, wide), (0, 2), 2, 1)
            for ours, columns in parts
        ),
        "experts.down": (HfTensor(f"{name}.down_proj", (count, wide, hidden), dims=(0, 2, 1)),),
        "experts.b_down": (HfTensor(f"{name}.down_proj_bias"),),
        "sinks": (HfTensor("self_attn.sinks"),),
    }


def _tensors(config: ModelConfig) -> HfTensors:
    return llama.hf_tensors(config, own=_experts(config))


GPT_OSS = Family("gpt_oss", "GptOss", _from_hf, _to_hf, _tensors)
