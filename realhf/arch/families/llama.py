"""Llama, whose names and sizes most families share. OLMo 2: Llama with norms on outputs and whole projections."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from realhf.api.model_config import ModelConfig
from realhf.arch.families import base, fields
from realhf.arch.families.base import Family, HfTensors
from realhf.arch.families.rotary import rotary, rotary_to_hf

KEYS = {
    "n_layers": "num_hidden_layers",
    "hidden": "hidden_size",
    "n_heads": "num_attention_heads",
    "intermediate": "intermediate_size",
    "vocab": "vocab_size",
}
OUTER_NAMES = {"embed.weight": "model.embed_tokens.weight", "final_norm.weight": "model.norm.weight"}
NORM_NAMES = {"attn_norm.weight": "input_layernorm.weight", "mlp_norm.weight": "post_attention_layernorm.weight"}
OLMO2_NORM_NAMES = {
    "attn_post_norm.weight": "post_attention_layernorm.weight",
    "mlp_post_norm.weight": "post_feedforward_layernorm.weight",
}
ATTENTION_NAMES = {f"w{part}": f"self_attn.{part}_proj.weight" for part in "qkvo"}
QKV_BIAS_NAMES = {f"b{part}": f"self_attn.{part}_proj.bias" for part in "qkv"}
PROJ_BIAS_NAMES = {"bo": "self_attn.o_proj.bias"}
QK_NORM_NAMES = {f"{part}_norm.weight": f"self_attn.{part}_norm.weight" for part in "qk"}
MLP_NAMES = {part: f"mlp.{part}_proj.weight" for part in ("gate", "up", "down")}
MLP_BIAS_NAMES = {f"b_{part}": f"mlp.{part}_proj.bias" for part in ("gate", "up", "down")}


def config_from_hf(
    hf: Mapping[str, Any],
    family: str,
    scalar_head: bool,
    max_positions: int,
    n_kv_heads: int | None = None,
    head_dim: int | None = None,
    norm_eps: float = 1e-6,
    rotary_base: float = 10000.0,
    tied: bool = False,
    **own: Any,
) -> ModelConfig:
    """Read what Llama and the families derived from it share, with the family's defaults; ``own`` are its own fields.

    Without ``n_kv_heads`` there are as many as query heads.
    """
    if head_dim is not None or hf.get("head_dim") is not None:
        head_dim = fields.whole_number(hf, "head_dim", head_dim)
    sizes = base.sizes_from_hf(hf, KEYS, scalar_head, tied, head_dim)
    max_positions = fields.whole_number(hf, "max_position_embeddings", max_positions)
    if "num_key_value_heads" in hf or n_kv_heads is None:  # null: one for each query head
        n_kv_heads = fields.whole_number(hf, "num_key_value_heads", sizes["n_heads"])
    fields.require(hf, partial_rotary_factor=1.0)
    shared: dict[str, Any] = {
        "n_kv_heads": n_kv_heads,
        "max_positions": max_positions,
        "norm_eps": fields.number(hf, "rms_norm_eps", norm_eps, minimum=0),
        **rotary(hf, max_positions, rotary_base),
    }
    if "activation" not in own:
        shared["activation"] = base.activation(hf, "hidden_act", "silu")
    if "sliding_windows" not in own:
        shared["sliding_windows"] = base.equal_windows(hf)
    if (pad := sizes["pad_token_id"]) is not None:
        if not -sizes["vocab"] <= pad < sizes["vocab"]:
            raise ValueError(f"field 'pad_token_id' is {pad}, outside the vocabulary of {sizes['vocab']} tokens")
        shared["padding_row"] = pad % sizes["vocab"]
    return ModelConfig(family, **sizes, **shared | own)


def config_to_hf(config: ModelConfig, **own: Any) -> dict[str, Any]:
    return {
        **base.sizes_to_hf(config, KEYS),
        "num_key_value_heads": config.n_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_positions,
        "rms_norm_eps": config.norm_eps,
        "hidden_act": base.activation_to_hf(config),
        **rotary_to_hf(config),
        **own,
    }


def attention_bias(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Return the biases of all four attention projections, which the field ``attention_bias`` sets."""
    return dict.fromkeys(("qkv_bias", "proj_bias"), fields.flag(hf, "attention_bias"))


def hf_tensors(
    config: ModelConfig,
    norms: Mapping[str, str] = NORM_NAMES,
    routed_mlp: str = "",
    experts: tuple[str, str, str] = ("gate_proj.weight", "up_proj.weight", "down_proj.weight"),
) -> HfTensors:
    """Return a model's tensors; ``experts`` names gate, up and down of each expert in the module ``routed_mlp``."""
    names = {
        **norms,
        **ATTENTION_NAMES,
        **(QKV_BIAS_NAMES if config.qkv_bias else {}),
        **(PROJ_BIAS_NAMES if config.proj_bias else {}),
        **(QK_NORM_NAMES if config.qk_norm != "none" else {}),
    }

    def block(layer: int) -> HfTensors:
        if layer not in config.routed_layers:
            return base.whole_tensors(names | MLP_NAMES | (MLP_BIAS_NAMES if config.mlp_bias else {}))
        stacks = base.stacked_experts(f"{routed_mlp}.experts.", *experts, config)
        return stacks | base.whole_tensors(names | {"router": f"{routed_mlp}.gate.weight"})

    return base.model_tensors(config, OUTER_NAMES, "lm_head.weight", "model.layers.", block)


def _llama_from_hf(hf: Mapping[str, Any], scalar_head: bool) -> ModelConfig:
    own: dict[str, Any] = {"mlp_bias": fields.flag(hf, "mlp_bias"), **attention_bias(hf)}
    return config_from_hf(hf, "llama", scalar_head, 2048, **own)


def _olmo2_from_hf(hf: Mapping[str, Any], scalar_head: bool) -> ModelConfig:
    own: dict[str, Any] = {"norm_placement": "post", "qk_norm": "full", **attention_bias(hf)}
    return config_from_hf(hf, "olmo2", scalar_head, 2048, norm_eps=1e-5, **own)


LLAMA = Family(
    "llama", "Llama", _llama_from_hf,
    lambda config: config_to_hf(config, attention_bias=config.qkv_bias, mlp_bias=config.mlp_bias), hf_tensors,
)  # fmt: skip
OLMO2 = Family(
    "olmo2", "Olmo2", _olmo2_from_hf,
    lambda config: config_to_hf(config, attention_bias=config.qkv_bias), partial(hf_tensors, norms=OLMO2_NORM_NAMES),
)  # fmt: skip
