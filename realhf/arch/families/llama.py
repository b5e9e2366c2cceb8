"""Llama, whose names and sizes most families share. OLMo 2: Llama with norms on outputs and whole projections."""

from collections.abc import Mapping
from functools import partial
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
MLP_NAMES = {"gate": "mlp.gate_proj.weight", "up": "mlp.up_proj.weight", "down": "mlp.down_proj.weight"}


def config_from_hf(
    hf: Mapping[str, Any],
    family: str,
    scalar_head: bool,
    max_positions: int,
    head_dim: int | None = None,
    norm_eps: float = 1e-6,
    rotary_base: float = 10000.0,
    tied: bool = False,
    **fields: Any,
) -> ModelConfig:
    """Read what Llama and the families derived from it share, with the family's defaults; ``fields`` are its own."""
    if head_dim is not None or hf.get("head_dim") is not None:
        head_dim = base.whole_number(hf, "head_dim", head_dim)
    sizes = base.sizes_from_hf(hf, KEYS, scalar_head, tied, head_dim)
    rotary_base, rotary_scaling = base.rotary(hf, rotary_base)
    shared: dict[str, Any] = {
        "n_kv_heads": base.whole_number(hf, "num_key_value_heads", sizes["n_heads"]),
        "max_positions": base.whole_number(hf, "max_position_embeddings", max_positions),
        "norm_eps": base.number(hf, "rms_norm_eps", norm_eps),
        "activation": base.activation(hf, "hidden_act", "silu"),
    }
    return ModelConfig(family, **sizes, rotary_base=rotary_base, rotary_scaling=rotary_scaling, **shared | fields)


def config_to_hf(config: ModelConfig, **fields: Any) -> dict[str, Any]:
    return {
        **base.sizes_to_hf(config, KEYS),
        "num_key_value_heads": config.n_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_positions,
        "rms_norm_eps": config.norm_eps,
        "hidden_act": base.HF_ACTIVATIONS[config.activation],
        **base.rotary_to_hf(config),
        **fields,
    }


def attention_bias(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Return the biases of all four attention projections, which the field ``attention_bias`` sets."""
    return dict.fromkeys(("qkv_bias", "proj_bias"), bool(hf.get("attention_bias", False)))


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
            return base.whole_tensors(names | MLP_NAMES)
        stacks = base.stacked_experts(f"{routed_mlp}.experts.", *experts, config)
        return stacks | base.whole_tensors(names | {"router": f"{routed_mlp}.gate.weight"})

    return base.model_tensors(config, OUTER_NAMES, "lm_head.weight", "model.layers.", block)


def _llama_from_hf(hf: Mapping[str, Any], scalar_head: bool) -> ModelConfig:
    base.require(hf, mlp_bias=False)
    return config_from_hf(hf, "llama", scalar_head, 2048, **attention_bias(hf))


def _olmo2_from_hf(hf: Mapping[str, Any], scalar_head: bool) -> ModelConfig:
    own: dict[str, Any] = {"norm_placement": "post", "qk_norm": "full", **attention_bias(hf)}
    return config_from_hf(hf, "olmo2", scalar_head, 2048, norm_eps=1e-5, **own)


LLAMA = Family(
    "llama", "Llama", _llama_from_hf,
    lambda config: config_to_hf(config, attention_bias=config.qkv_bias, mlp_bias=False), hf_tensors,
)  # fmt: skip
OLMO2 = Family(
    "olmo2", "Olmo2", _olmo2_from_hf,
    lambda config: config_to_hf(config, attention_bias=config.qkv_bias), partial(hf_tensors, norms=OLMO2_NORM_NAMES),
)  # fmt: skip
