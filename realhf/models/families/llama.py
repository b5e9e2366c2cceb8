"""Llama: RMS norms, rotary positions, grouped key/value heads, a gated MLP. Qwen2 shares its names."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from realhf.api.model import ModelConfig
from realhf.models.families import base
from realhf.models.families.base import Family, HfTensor

BLOCK_NAMES = {
    "attn_norm.weight": "input_layernorm.weight",
    "wq": "self_attn.q_proj.weight",
    "wk": "self_attn.k_proj.weight",
    "wv": "self_attn.v_proj.weight",
    "wo": "self_attn.o_proj.weight",
    "mlp_norm.weight": "post_attention_layernorm.weight",
    "gate": "mlp.gate_proj.weight",
    "up": "mlp.up_proj.weight",
    "down": "mlp.down_proj.weight",
}
QKV_BIAS_NAMES = {"bq": "self_attn.q_proj.bias", "bk": "self_attn.k_proj.bias", "bv": "self_attn.v_proj.bias"}
PROJ_BIAS_NAMES = {"bo": "self_attn.o_proj.bias"}


def sizes_from_hf(hf: Mapping[str, Any], family: str, scalar_head: bool, max_positions: int) -> ModelConfig:
    """Read what Llama and its descendants spell alike; biases are left out."""
    hidden, n_heads = base.whole_number(hf, "hidden_size"), base.whole_number(hf, "num_attention_heads")
    if hf.get("head_dim") is None and hidden % n_heads:
        raise ValueError(f"field 'hidden_size' is {hidden}, not a multiple of num_attention_heads ({n_heads})")
    rotary_base, rotary_scaling = base.rotary(hf)
    return ModelConfig(
        family=family,
        n_layers=base.whole_number(hf, "num_hidden_layers"),
        hidden=hidden,
        n_heads=n_heads,
        n_kv_heads=base.whole_number(hf, "num_key_value_heads", n_heads),
        head_dim=base.whole_number(hf, "head_dim", hidden // n_heads),
        intermediate=base.whole_number(hf, "intermediate_size"),
        vocab=base.whole_number(hf, "vocab_size"),
        max_positions=base.whole_number(hf, "max_position_embeddings", max_positions),
        head="scalar" if scalar_head else "lm",
        norm_eps=base.number(hf, "rms_norm_eps", 1e-6),
        activation=base.activation(hf, "hidden_act", "silu"),
        rotary_base=rotary_base,
        rotary_scaling=rotary_scaling,
        tied_embedding=bool(hf.get("tie_word_embeddings", False)) and not scalar_head,
        init_std=base.number(hf, "initializer_range", 0.02),
        **base.token_ids(hf),
    )


def sizes_to_hf(config: ModelConfig) -> dict[str, Any]:
    """The inverse of ``sizes_from_hf``."""
    return {
        "hidden_size": config.hidden,
        "num_attention_heads": config.n_heads,
        "num_hidden_layers": config.n_layers,
        "num_key_value_heads": config.n_kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.intermediate,
        "vocab_size": config.vocab,
        "max_position_embeddings": config.max_positions,
        "rms_norm_eps": config.norm_eps,
        "hidden_act": base.HF_ACTIVATIONS[config.activation],
        "tie_word_embeddings": config.tied_embedding and config.head == "lm",
        "initializer_range": config.init_std,
        **base.rotary_to_hf(config),
        **base.token_ids_to_hf(config),
    }


def hf_tensors(config: ModelConfig) -> dict[str, HfTensor]:
    block = BLOCK_NAMES | (QKV_BIAS_NAMES if config.qkv_bias else {}) | (PROJ_BIAS_NAMES if config.proj_bias else {})
    names = {"embed.weight": "model.embed_tokens.weight", "final_norm.weight": "model.norm.weight"}
    for i in range(config.n_layers):
        names |= {f"layers.{i}.{ours}": f"model.layers.{i}.{theirs}" for ours, theirs in block.items()}
    if config.head == "scalar":
        names["head.weight"] = "score.weight"
    elif not config.tied_embedding:
        names["head.weight"] = "lm_head.weight"
    return {ours: HfTensor(theirs) for ours, theirs in names.items()}


def _from_hf(hf: Mapping[str, Any], scalar_head: bool) -> ModelConfig:
    base.refuse(hf, mlp_bias=False)
    bias = bool(hf.get("attention_bias", False))
    return replace(sizes_from_hf(hf, "llama", scalar_head, 2048), qkv_bias=bias, proj_bias=bias)


def _to_hf(config: ModelConfig) -> dict[str, Any]:
    return sizes_to_hf(config) | {"attention_bias": config.qkv_bias, "mlp_bias": False}


LLAMA = Family(
    name="llama",
    hf_architectures=("LlamaForCausalLM", "LlamaForSequenceClassification"),
    base_prefix="model.",
    config_from_hf=_from_hf,
    config_to_hf=_to_hf,
    hf_tensors=hf_tensors,
    ignored=("rotary_emb.inv_freq",),
)
