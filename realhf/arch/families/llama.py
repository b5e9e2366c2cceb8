"""Llama: RMS norms, rotary positions, grouped key/value heads, a gated MLP. Most families share its names."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from realhf.api.model_config import ModelConfig
from realhf.arch.families import base
from realhf.arch.families.base import Family, HfTensors

KEYS = {
    "n_layers": "num_hidden_layers",
    "hidden": "hidden_size",
    "n_heads": "num_attention_heads",
    "intermediate": "intermediate_size",
    "vocab": "vocab_size",
}
NORM_NAMES = {"attn_norm.weight": "input_layernorm.weight", "mlp_norm.weight": "post_attention_layernorm.weight"}
ATTENTION_NAMES = {f"w{part}": f"self_attn.{part}_proj.weight" for part in "qkvo"}
QKV_BIAS_NAMES = {f"b{part}": f"self_attn.{part}_proj.bias" for part in "qkv"}
PROJ_BIAS_NAMES = {"bo": "self_attn.o_proj.bias"}
QK_NORM_NAMES = {f"{part}_norm.weight": f"self_attn.{part}_norm.weight" for part in "qk"}
MLP_NAMES = {"gate": "mlp.gate_proj.weight", "up": "mlp.up_proj.weight", "down": "mlp.down_proj.weight"}


def sizes_from_hf(
    hf: Mapping[str, Any],
    family: str,
    scalar_head: bool,
    max_positions: int,
    head_dim: int | None = None,
    norm_eps: float = 1e-6,
    rotary_base: float = 10000.0,
    tied: bool = False,
) -> ModelConfig:
    """Read the fields that Llama and the families derived from it share, with the family's defaults; no biases."""
    sizes = base.sizes_from_hf(hf, KEYS, scalar_head, tied)
    if hf.get("head_dim") is None and head_dim is None:
        base.require_head_dim(hf, KEYS, sizes)
    sizes["head_dim"] = base.whole_number(hf, "head_dim", head_dim or sizes.get("head_dim"))
    rotary_base, rotary_scaling = base.rotary(hf, rotary_base)
    return ModelConfig(
        family=family,
        **sizes,
        n_kv_heads=base.whole_number(hf, "num_key_value_heads", sizes["n_heads"]),
        max_positions=base.whole_number(hf, "max_position_embeddings", max_positions),
        norm_eps=base.number(hf, "rms_norm_eps", norm_eps),
        activation=base.activation(hf, "hidden_act", "silu"),
        rotary_base=rotary_base,
        rotary_scaling=rotary_scaling,
    )


def sizes_to_hf(config: ModelConfig) -> dict[str, Any]:
    """The inverse of ``sizes_from_hf``."""
    return {
        **base.sizes_to_hf(config, KEYS),
        "num_key_value_heads": config.n_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_positions,
        "rms_norm_eps": config.norm_eps,
        "hidden_act": base.HF_ACTIVATIONS[config.activation],
        **base.rotary_to_hf(config),
    }


def attention_names(config: ModelConfig) -> dict[str, str]:
    return {
        **ATTENTION_NAMES,
        **(QKV_BIAS_NAMES if config.qkv_bias else {}),
        **(PROJ_BIAS_NAMES if config.proj_bias else {}),
        **(QK_NORM_NAMES if config.qk_norm != "none" else {}),
    }


def outer_names(config: ModelConfig) -> dict[str, str]:
    """Return the names of embedding, final norm and head."""
    names = {"embed.weight": "model.embed_tokens.weight", "final_norm.weight": "model.norm.weight"}
    if config.head == "scalar":
        names["head.weight"] = "score.weight"
    elif not config.tied_embedding:
        names["head.weight"] = "lm_head.weight"
    return names


def hf_tensors(config: ModelConfig, norms: Mapping[str, str] = NORM_NAMES) -> HfTensors:
    """Return the tensors of a model with dense MLPs; ``norms`` are the names of a block's norms."""
    block = {**norms, **attention_names(config), **MLP_NAMES}
    names = outer_names(config)
    for i in range(config.n_layers):
        names |= {f"layers.{i}.{ours}": f"model.layers.{i}.{theirs}" for ours, theirs in block.items()}
    return base.whole_tensors(names)


def routed_tensors(config: ModelConfig, mlp: str, experts: tuple[str, str, str]) -> HfTensors:
    """Return the tensors of a model with routed experts in module ``mlp``; ``experts`` are gate, up and down."""
    tensors = base.whole_tensors(outer_names(config))
    for i in range(config.n_layers):
        ours, theirs = f"layers.{i}.", f"model.layers.{i}."
        names = {**NORM_NAMES, **attention_names(config)}
        if i in config.routed_layers:
            names["router"] = f"{mlp}.gate.weight"
            stacks = base.stacked_experts(f"{theirs}{mlp}.experts.", *experts, config)
            tensors |= {ours + name: stack for name, stack in stacks.items()}
        else:
            names |= MLP_NAMES
        tensors |= base.whole_tensors({ours + name: theirs + other for name, other in names.items()})
    return tensors


def with_attention_bias(config: ModelConfig, hf: Mapping[str, Any]) -> ModelConfig:
    """Return the sizes with the biases of all four attention projections if ``attention_bias`` is set."""
    bias = bool(hf.get("attention_bias", False))
    return replace(config, qkv_bias=bias, proj_bias=bias)


def _from_hf(hf: Mapping[str, Any], scalar_head: bool) -> ModelConfig:
    base.require(hf, mlp_bias=False)
    return with_attention_bias(sizes_from_hf(hf, "llama", scalar_head, 2048), hf)


def _to_hf(config: ModelConfig) -> dict[str, Any]:
    return sizes_to_hf(config) | {"attention_bias": config.qkv_bias, "mlp_bias": False}


LLAMA = Family("llama", "Llama", _from_hf, _to_hf, hf_tensors)
