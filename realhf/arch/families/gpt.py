"""GPT-2, GPT-NeoX and Pythia: layer norms, biases everywhere, an ungated MLP. GPT-2 stores matrices as [in, out]."""

from collections.abc import Mapping, Sequence
from typing import Any

from realhf.api.model_config import ModelConfig
from realhf.arch.families import llama
from realhf.arch.families.common import base, fields
from realhf.arch.families.common.base import TRANSPOSED, Family, HfTensor, HfTensors
from realhf.arch.families.common.rotary import partial_rotary, partial_rotary_to_hf

GPT2_KEYS = {"n_layers": "n_layer", "hidden": "n_embd", "n_heads": "n_head", "vocab": "vocab_size"}
NEOX_KEYS = {ours: theirs for ours, theirs in llama.KEYS.items() if ours != "intermediate"}
NORMS = (("attn_norm.weight", "attn_norm.bias"), ("mlp_norm.weight", "mlp_norm.bias"))
MATRICES = (("wo", "bo"), ("up", "b_up"), ("down", "b_down"))
GPT2_UNUSED = (
    "n_ctx resid_pdrop embd_pdrop attn_pdrop reorder_and_upcast_attn summary_type summary_use_proj summary_activation "
    "summary_proj_to_labels summary_first_dropout n_special predict_special_tokens"
)
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


def _config(family: str, sizes: Mapping[str, Any], attention_bias: bool, **own: Any) -> ModelConfig:
    shared: dict[str, Any] = {"norm": "layer", "mlp": "ungated", "mlp_bias": True}
    shared |= dict.fromkeys(("qkv_bias", "proj_bias"), attention_bias)
    return ModelConfig(family, **sizes, n_kv_heads=sizes["n_heads"], **shared, **own)


def _gpt2_from_hf(hf: Mapping[str, Any], scalar_head: bool) -> ModelConfig:
    fields.require(hf, scale_attn_weights=True, scale_attn_by_inverse_layer_idx=False)
    sizes = base.sizes_from_hf(hf, GPT2_KEYS, scalar_head, tied=True)
    return _config(
        "gpt2",
        sizes,
        attention_bias=True,
        intermediate=fields.whole_number(hf, "n_inner", 4 * sizes["hidden"]),
        max_positions=fields.whole_number(hf, "n_positions", 1024),
        norm_eps=fields.number(hf, "layer_norm_epsilon", 1e-5, minimum=0),
        activation=base.activation(hf, "activation_function", "gelu_new"),
        learned_positions=True,
    )


def _gpt2_to_hf(config: ModelConfig) -> dict[str, Any]:
    return base.sizes_to_hf(config, GPT2_KEYS) | {
        "n_inner": config.intermediate,
        "n_positions": config.max_positions,
        "layer_norm_epsilon": config.norm_eps,
        "activation_function": base.activation_to_hf(config),
    }


def _neox_from_hf(hf: Mapping[str, Any], scalar_head: bool) -> ModelConfig:
    """Read GPT-NeoX, whose rotary parameters have further names before transformers 5."""
    sizes = base.sizes_from_hf(hf, NEOX_KEYS, scalar_head)
    max_positions = fields.whole_number(hf, "max_position_embeddings", 2048)
    old_base, old_share = fields.number(hf, "rotary_emb_base", 1e4), fields.number(hf, "rotary_pct", 0.25)
    fields.require(hf, rope_theta=old_base, partial_rotary_factor=old_share)  # versions differ in which they read
    return _config(
        "gpt_neox",
        sizes,
        intermediate=fields.whole_number(hf, "intermediate_size", 24576),
        attention_bias=fields.flag(hf, "attention_bias", True),
        max_positions=max_positions,
        norm_eps=fields.number(hf, "layer_norm_eps", 1e-5, minimum=0),
        activation=base.activation(hf, "hidden_act", "gelu"),
        parallel_residual=fields.flag(hf, "use_parallel_residual", True),
        **partial_rotary(hf, max_positions, sizes["head_dim"], old_share, old_base),
    )


def _neox_to_hf(config: ModelConfig) -> dict[str, Any]:
    rotary_fields = partial_rotary_to_hf(config)
    return base.sizes_to_hf(config, NEOX_KEYS) | {
        "intermediate_size": config.intermediate,
        "max_position_embeddings": config.max_positions,
        "layer_norm_eps": config.norm_eps,
        "hidden_act": base.activation_to_hf(config),
        "use_parallel_residual": config.parallel_residual,
        "rotary_pct": rotary_fields.pop("partial_rotary_factor"),
        "rotary_emb_base": config.rotary_base,
        "attention_bias": config.qkv_bias,
        **rotary_fields,
    }


def _modules(names: Sequence[str], transpose: bool = False) -> HfTensors:
    """Return weight and bias of the modules for ``NORMS`` and ``MATRICES``."""
    tensors: HfTensors = {}
    for (weight, bias), name in zip(NORMS + MATRICES, names, strict=True):
        dims = TRANSPOSED if transpose and (weight, bias) in MATRICES else None
        tensors[weight] = (HfTensor(f"{name}.weight", dims=dims),)
        tensors[bias] = (HfTensor(f"{name}.bias"),)
    return tensors


def _gpt2_tensors(config: ModelConfig) -> HfTensors:
    """Query, key and value are thirds of one fused tensor."""
    tensors, hidden = _modules(GPT2_MODULES, transpose=True), config.hidden
    for third, part in enumerate("qkv"):
        columns = (third * hidden, (third + 1) * hidden)
        tensors[f"w{part}"] = (HfTensor("attn.c_attn.weight", dims=TRANSPOSED, box=((0, hidden), columns)),)
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
    if not config.qkv_bias:
        tensors = {name: parts for name, parts in tensors.items() if name not in ("bq", "bk", "bv", "bo")}
    return base.model_tensors(config, NEOX_OUTER_NAMES, "embed_out.weight", "gpt_neox.layers.", lambda layer: tensors)


GPT2 = Family(
    "gpt2", "GPT2", _gpt2_from_hf, _gpt2_to_hf, _gpt2_tensors,
    base_prefix="transformer.", ignored=(".attn.bias", ".attn.masked_bias"), lm_class="LMHeadModel",
    unused=frozenset(GPT2_UNUSED.split()),
)  # fmt: skip
GPT_NEOX = Family(
    "gpt_neox", "GPTNeoX", _neox_from_hf, _neox_to_hf, _neox_tensors,
    base_prefix="gpt_neox.", ignored=(".attention.bias", ".attention.masked_bias", "rotary_emb.inv_freq"),
)  # fmt: skip
