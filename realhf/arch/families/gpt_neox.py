"""GPT-NeoX and Pythia: layer norms, biases everywhere, an ungated MLP parallel to attention, partial rotary."""

from collections.abc import Mapping
from typing import Any

from realhf.api.model_config import ModelConfig
from realhf.arch.families import base, llama
from realhf.arch.families.base import Family, HfTensor, HfTensors

KEYS = {ours: theirs for ours, theirs in llama.KEYS.items() if ours != "intermediate"}
MODULES = {
    ("attn_norm.weight", "attn_norm.bias"): "input_layernorm",
    ("wo", "bo"): "attention.dense",
    ("mlp_norm.weight", "mlp_norm.bias"): "post_attention_layernorm",
    ("up", "b_up"): "mlp.dense_h_to_4h",
    ("down", "b_down"): "mlp.dense_4h_to_h",
}


def _from_hf(hf: Mapping[str, Any], scalar_head: bool) -> ModelConfig:
    base.require(hf, attention_bias=True)
    sizes = base.sizes_from_hf(hf, KEYS, scalar_head)
    base.require_head_dim(hf, KEYS, sizes)
    new = hf.get("rope_parameters") or {}
    rotary_base, rotary_scaling = base.rotary(hf, base.number(hf, "rotary_emb_base", 10000.0))
    share = base.number(new if "partial_rotary_factor" in new else hf, "partial_rotary_factor",
                        base.number(hf, "rotary_pct", 0.25))  # fmt: skip
    return ModelConfig(
        family="gpt_neox",
        **sizes,
        n_kv_heads=sizes["n_heads"],
        intermediate=base.whole_number(hf, "intermediate_size", 24576),
        max_positions=base.whole_number(hf, "max_position_embeddings", 2048),
        norm="layer",
        norm_eps=base.number(hf, "layer_norm_eps", 1e-5),
        mlp="ungated",
        activation=base.activation(hf, "hidden_act", "gelu"),
        parallel_residual=bool(hf.get("use_parallel_residual", True)),
        rotary_base=rotary_base,
        rotary_scaling=rotary_scaling,
        rotary_dims=int(sizes["head_dim"] * share),
        qkv_bias=True,
        proj_bias=True,
    )


def _to_hf(config: ModelConfig) -> dict[str, Any]:
    rotary = base.rotary_to_hf(config)
    share = (config.rotary_dims or config.head_dim) / config.head_dim
    rotary["rope_parameters"]["partial_rotary_factor"] = share
    return base.sizes_to_hf(config, KEYS) | {
        "intermediate_size": config.intermediate,
        "max_position_embeddings": config.max_positions,
        "layer_norm_eps": config.norm_eps,
        "hidden_act": base.HF_ACTIVATIONS[config.activation],
        "use_parallel_residual": config.parallel_residual,
        "rotary_pct": share,
        "rotary_emb_base": config.rotary_base,
        "attention_bias": True,
        **rotary,
    }


def _heads(config: ModelConfig, name: str, part: int, inner: tuple[tuple[int, int], ...]) -> tuple[HfTensor, ...]:
    """Return the rows of every head in a fused tensor that interleaves query, key and value by head."""
    d = config.head_dim
    return tuple(
        HfTensor(
            name,
            box=(((3 * head + part) * d, (3 * head + part + 1) * d), *inner),
            at=((head * d, (head + 1) * d), *inner),
        )
        for head in range(config.n_heads)
    )


def _block(config: ModelConfig, prefix: str) -> HfTensors:
    names = {weight: f"{prefix}{theirs}.weight" for (weight, _), theirs in MODULES.items()}
    names |= {bias: f"{prefix}{theirs}.bias" for (_, bias), theirs in MODULES.items()}
    tensors = base.whole_tensors(names)
    fused = f"{prefix}attention.query_key_value"
    for number, part in enumerate("qkv"):
        tensors[f"w{part}"] = _heads(config, f"{fused}.weight", number, ((0, config.hidden),))
        tensors[f"b{part}"] = _heads(config, f"{fused}.bias", number, ())
    return tensors


def hf_tensors(config: ModelConfig) -> HfTensors:
    names = {
        "embed.weight": "gpt_neox.embed_in.weight",
        "final_norm.weight": "gpt_neox.final_layer_norm.weight",
        "final_norm.bias": "gpt_neox.final_layer_norm.bias",
    }
    if config.head == "scalar":
        names["head.weight"] = "score.weight"
    elif not config.tied_embedding:
        names["head.weight"] = "embed_out.weight"
    tensors = base.whole_tensors(names)
    for i in range(config.n_layers):
        block = _block(config, f"gpt_neox.layers.{i}.")
        tensors |= {f"layers.{i}.{ours}": parts for ours, parts in block.items()}
    return tensors


GPT_NEOX = Family(
    "gpt_neox", "GPTNeoX", _from_hf, _to_hf, hf_tensors,
    base_prefix="gpt_neox.", ignored=(".attention.bias", ".attention.masked_bias", "rotary_emb.inv_freq"),
)  # fmt: skip
