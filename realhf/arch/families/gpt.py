"""GPT-2, GPT-NeoX and Pythia: layer norms, biases everywhere, an ungated MLP. GPT-2 stores matrices as [in, out]."""

from collections.abc import Mapping, Sequence
from typing import Any

from realhf.api.model_config import ModelConfig
from realhf.arch.families import base, llama
from realhf.arch.families.base import Family, HfTensor, HfTensors

GPT2_KEYS = {"n_layers": "n_layer", "hidden": "n_embd", "n_heads": "n_head", "vocab": "vocab_size"}
NEOX_KEYS = {ours: theirs for ours, theirs in llama.KEYS.items() if ours != "intermediate"}
NORMS = (("attn_norm.weight", "attn_norm.bias"), ("mlp_norm.weight", "mlp_norm.bias"))
MATRICES = (("wo", "bo"), ("up", "b_up"), ("down", "b_down"))
GPT2_MODULES = ("ln_1", "ln_2", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
NEOX_MODULES = (
    "input_layernorm", "post_attention_layernorm", "attention.dense", "mlp.dense_h_to_4h", "mlp.dense_4h_to_h",
)  # fmt: skip
GPT2_OUTER_NAMES = {
    "embed.weight": "transformer.wte.weight",
    "embed.positions": "transformer.wpe.weight",
    "final_norm.weight": "transformer.ln_f.weight",
    "final_norm.bias": "transformer.ln_f.bias",
}
NEOX_OUTER_NAMES = {
    "embed.weight": "gpt_neox.embed_in.weight",
    "final_norm.weight": "gpt_neox.final_layer_norm.weight",
    "final_norm.bias": "gpt_neox.final_layer_norm.bias",
}


def _config(family: str, sizes: Mapping[str, Any], **fields: Any) -> ModelConfig:
    shared: dict[str, Any] = {"norm": "layer", "mlp": "ungated", "qkv_bias": True, "proj_bias": True}
    return ModelConfig(family, **sizes, n_kv_heads=sizes["n_heads"], **shared, **fields)


def _gpt2_from_hf(hf: Mapping[str, Any], scalar_head: bool) -> ModelConfig:
    base.require(hf, scale_attn_weights=True, scale_attn_by_inverse_layer_idx=False, add_cross_attention=False)
    sizes = base.sizes_from_hf(hf, GPT2_KEYS, scalar_head, tied=True)
    return _config(
        "gpt2",
        sizes,
        intermediate=base.whole_number(hf, "n_inner", 4 * sizes["hidden"]),
        max_positions=base.whole_number(hf, "n_positions", 1024),
        norm_eps=base.number(hf, "layer_norm_epsilon", 1e-5),
        activation=base.activation(hf, "activation_function", "gelu_new"),
        learned_positions=True,
    )


def _gpt2_to_hf(config: ModelConfig) -> dict[str, Any]:
    return base.sizes_to_hf(config, GPT2_KEYS) | {
        "n_inner": config.intermediate,
        "n_positions": config.max_positions,
        "layer_norm_epsilon": config.norm_eps,
        "activation_function": base.HF_ACTIVATIONS[config.activation],
    }


def _neox_from_hf(hf: Mapping[str, Any], scalar_head: bool) -> ModelConfig:
    base.require(hf, attention_bias=True)
    sizes = base.sizes_from_hf(hf, NEOX_KEYS, scalar_head)
    new = hf.get("rope_parameters") or {}
    rotary_base, rotary_scaling = base.rotary(hf, base.number(hf, "rotary_emb_base", 10000.0))
    share = base.number(new if "partial_rotary_factor" in new else hf, "partial_rotary_factor",
                        base.number(hf, "rotary_pct", 0.25))  # fmt: skip
    return _config(
        "gpt_neox",
        sizes,
        intermediate=base.whole_number(hf, "intermediate_size", 24576),
        max_positions=base.whole_number(hf, "max_position_embeddings", 2048),
        norm_eps=base.number(hf, "layer_norm_eps", 1e-5),
        activation=base.activation(hf, "hidden_act", "gelu"),
        parallel_residual=bool(hf.get("use_parallel_residual", True)),
        rotary_base=rotary_base,
        rotary_scaling=rotary_scaling,
        rotary_dims=int(sizes["head_dim"] * share),
    )


def _neox_to_hf(config: ModelConfig) -> dict[str, Any]:
    rotary = base.rotary_to_hf(config)
    share = (config.rotary_dims or config.head_dim) / config.head_dim
    rotary["rope_parameters"]["partial_rotary_factor"] = share
    return base.sizes_to_hf(config, NEOX_KEYS) | {
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


def _modules(names: Sequence[str], transpose: bool = False) -> HfTensors:
    """Return weight and bias of the modules for ``NORMS`` and ``MATRICES``."""
    tensors: HfTensors = {}
    for (weight, bias), name in zip(NORMS + MATRICES, names, strict=True):
        tensors[weight] = (HfTensor(f"{name}.weight", transpose=transpose and (weight, bias) in MATRICES),)
        tensors[bias] = (HfTensor(f"{name}.bias"),)
    return tensors


def _gpt2_tensors(config: ModelConfig) -> HfTensors:
    """Query, key and value are thirds of one fused tensor."""
    tensors, hidden = _modules(GPT2_MODULES, transpose=True), config.hidden
    for third, part in enumerate("qkv"):
        columns = (third * hidden, (third + 1) * hidden)
        tensors[f"w{part}"] = (HfTensor("attn.c_attn.weight", transpose=True, box=((0, hidden), columns)),)
        tensors[f"b{part}"] = (HfTensor("attn.c_attn.bias", box=(columns,)),)
    return base.model_tensors(config, GPT2_OUTER_NAMES, "lm_head.weight", "transformer.h.", lambda layer: tensors)


def _neox_heads(config: ModelConfig, name: str, part: int, inner: tuple[tuple[int, int], ...]) -> tuple[HfTensor, ...]:
    """Return the rows of every head in a fused tensor that interleaves query, key and value by head."""
    d = config.head_dim
    rows = [((3 * head + part) * d, (3 * head + part + 1) * d) for head in range(config.n_heads)]
    return tuple(
        HfTensor(name, box=(row, *inner), at=((head * d, (head + 1) * d), *inner)) for head, row in enumerate(rows)
    )


def _neox_tensors(config: ModelConfig) -> HfTensors:
    tensors, fused = _modules(NEOX_MODULES), "attention.query_key_value"
    for number, part in enumerate("qkv"):
        tensors[f"w{part}"] = _neox_heads(config, f"{fused}.weight", number, ((0, config.hidden),))
        tensors[f"b{part}"] = _neox_heads(config, f"{fused}.bias", number, ())
    return base.model_tensors(config, NEOX_OUTER_NAMES, "embed_out.weight", "gpt_neox.layers.", lambda layer: tensors)


GPT2 = Family(
    "gpt2", "GPT2", _gpt2_from_hf, _gpt2_to_hf, _gpt2_tensors,
    base_prefix="transformer.", ignored=(".attn.bias", ".attn.masked_bias"), lm_class="LMHeadModel",
)  # fmt: skip
GPT_NEOX = Family(
    "gpt_neox", "GPTNeoX", _neox_from_hf, _neox_to_hf, _neox_tensors,
    base_prefix="gpt_neox.", ignored=(".attention.bias", ".attention.masked_bias", "rotary_emb.inv_freq"),
)  # fmt: skip
