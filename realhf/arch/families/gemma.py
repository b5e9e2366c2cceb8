"""Gemma: Llama with scaled embeddings, norm weights with an offset of one, and a GELU gate.

Gemma 2 has norms on outputs and windows in every second layer, Gemma 3 norms of heads and two rotary bases.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

from realhf.api.model_config import ModelConfig
from realhf.arch.families import llama
from realhf.arch.families.common import base, fields
from realhf.arch.families.common.base import Family
from realhf.arch.families.common.rotary import rotary_by_layer_type, rotary_by_layer_type_to_hf

GEMMA2_NORM_NAMES = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_post_norm.weight": "post_attention_layernorm.weight",
    "mlp_norm.weight": "pre_feedforward_layernorm.weight",
    "mlp_post_norm.weight": "post_feedforward_layernorm.weight",
}


def _gemma_from_hf(
    hf: Mapping[str, Any], scalar_head: bool, family: str, n_kv_heads: int, max_positions: int = 8192, **own: Any
) -> ModelConfig:
    """Read what all versions share; ``own`` are the fields of one of them."""
    own |= {"norm_offset": 1.0, "scaled_embedding": True, **llama.attention_bias(hf)}
    return llama.config_from_hf(hf, family, scalar_head, max_positions, n_kv_heads, head_dim=256, tied=True, **own)


def _gemma1_from_hf(hf: Mapping[str, Any], scalar_head: bool) -> ModelConfig:
    """Read Gemma; ``gelu`` stands for the tanh form, which the weights were trained with.

    Transformers 4.39 to 4.57 read ``hidden_activation``, others ``hidden_act``.
    """
    default = "gelu_pytorch_tanh"
    forms = {"hidden_act": base.activation(hf, "hidden_act", default)}
    if hf.get("hidden_activation") is not None:
        forms["hidden_activation"] = base.activation(hf, "hidden_activation", default)
    forms = {name: "gelu_tanh" if form == "gelu" else form for name, form in forms.items()}
    return _gemma_from_hf(hf, scalar_head, "gemma", 16, activation=fields.agreed(forms, *forms))


def _gemma_to_hf(config: ModelConfig) -> dict[str, Any]:
    activation = base.activation_to_hf(config)
    return llama.config_to_hf(config, attention_bias=config.qkv_bias, hidden_activation=activation)


def _gemma2_from_hf(hf: Mapping[str, Any], scalar_head: bool) -> ModelConfig:
    own: dict[str, Any] = {
        "norm_placement": "sandwich",
        "sliding_windows": base.sliding_windows(hf, base.sliding_window(hf, 4096), lambda layer: layer % 2 == 0),
        "activation": base.activation(hf, "hidden_activation", "gelu_pytorch_tanh"),
        "attention_scale": fields.number(hf, "query_pre_attn_scalar", 256.0) ** -0.5,
        "attention_softcap": fields.optional_number(hf, "attn_logit_softcapping", 50.0),
        "logit_softcap": fields.optional_number(hf, "final_logit_softcapping", 30.0),
    }
    return _gemma_from_hf(hf, scalar_head, "gemma2", 4, **own)


def _gemma2_to_hf(config: ModelConfig) -> dict[str, Any]:
    scalar = round(config.attention_scale**-2, 6)
    return _gemma_to_hf(config) | {
        **base.window_by_layer_to_hf(config),
        "query_pre_attn_scalar": int(scalar) if scalar == int(scalar) else scalar,
        "attn_logit_softcapping": config.attention_softcap or None,
        "final_logit_softcapping": config.logit_softcap or None,
    }


def _gemma3_from_hf(hf: Mapping[str, Any], scalar_head: bool) -> ModelConfig:
    hf = fields.defaulted(hf, num_attention_heads=8, vocab_size=262208)  # not stored in text parts
    step = fields.whole_number(hf, "sliding_window_pattern", 6)  # of older versions, without ``layer_types``
    own: dict[str, Any] = {
        "norm_placement": "sandwich",
        "qk_norm": "head",
        "sliding_windows": base.all_but_every(step, hf, base.sliding_window(hf, 4096)),
        "activation": base.activation(hf, "hidden_activation", "gelu_pytorch_tanh"),
        "attention_scale": fields.number(hf, "query_pre_attn_scalar", 256.0) ** -0.5,
        "logit_softcap": fields.optional_number(hf, "final_logit_softcapping", 0.0),
        "read_rotary": lambda n, _: rotary_by_layer_type(hf, n, 1e6, 1e4, "rope_local_base_freq"),
    }
    fields.require(hf, attn_logit_softcapping=None)  # transformers reads it, without effect
    return _gemma_from_hf(hf, scalar_head, "gemma3_text", 4, 131072, **own)


def _gemma3_to_hf(config: ModelConfig) -> dict[str, Any]:
    return _gemma2_to_hf(config) | {
        **rotary_by_layer_type_to_hf(config),
        "rope_local_base_freq": config.windowed_rotary_base or config.rotary_base,
    }


GEMMA = Family("gemma", "Gemma", _gemma1_from_hf, _gemma_to_hf, llama.hf_tensors)
GEMMA2 = Family(
    "gemma2", "Gemma2", _gemma2_from_hf, _gemma2_to_hf, partial(llama.hf_tensors, norms=GEMMA2_NORM_NAMES),
    unused=frozenset({"hidden_act"}),
)  # fmt: skip
GEMMA3 = Family(
    "gemma3_text", "Gemma3", _gemma3_from_hf, _gemma3_to_hf, partial(llama.hf_tensors, norms=GEMMA2_NORM_NAMES),
    scalar_class="Gemma3TextForSequenceClassification", unused=frozenset({"hidden_act", "_sliding_window_pattern"}),
)  # fmt: skip
