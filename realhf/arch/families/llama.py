"""Llama, whose names and sizes most families share."""

from collections.abc import Callable, Mapping
from itertools import accumulate
from typing import Any

from realhf.api.model_config import ModelConfig
from realhf.api.param_box import Box
from realhf.arch.families.common import base, fields
from realhf.arch.families.common.base import Family, HfTensor, HfTensors
from realhf.arch.families.common.rotary import rotary, rotary_to_hf

KEYS = {
    "n_layers": "num_hidden_layers",
    "hidden": "hidden_size",
    "n_heads": "num_attention_heads",
    "intermediate": "intermediate_size",
    "vocab": "vocab_size",
}
OUTER_NAMES = {"embed.weight": "model.embed_tokens.weight", "final_norm.weight": "model.norm.weight"}
NORM_NAMES = {"attn_norm.weight": "input_layernorm.weight", "mlp_norm.weight": "post_attention_layernorm.weight"}
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
    norm_eps_key: str = "rms_norm_eps",
    read_rotary: Callable[[int, int], dict[str, Any]] | None = None,
    **own: Any,
) -> ModelConfig:
    """Read what Llama and the families derived from it share, with the family's defaults; ``own`` are its own fields.

    Without ``n_kv_heads`` there are as many as query heads. ``read_rotary`` takes the number of positions and the size
    of a head, for a family with more rotary fields than a base and a scaling.
    """
    if head_dim is not None or hf.get("head_dim") is not None:
        head_dim = fields.whole_number(hf, "head_dim", head_dim)
    sizes = base.sizes_from_hf(hf, KEYS, scalar_head, tied, head_dim)
    max_positions = fields.whole_number(hf, "max_position_embeddings", max_positions)
    if "num_key_value_heads" in hf or n_kv_heads is None:  # null: one for each query head
        n_kv_heads = fields.whole_number(hf, "num_key_value_heads", sizes["n_heads"])
    shared: dict[str, Any] = {
        "n_kv_heads": n_kv_heads,
        "max_positions": max_positions,
        "norm_eps": fields.number(hf, norm_eps_key, norm_eps, minimum=0),
    }
    if read_rotary is None:
        fields.require(hf, partial_rotary_factor=1.0)
        shared |= rotary(hf, max_positions, rotary_base)
    else:
        shared |= read_rotary(max_positions, sizes["head_dim"])
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
    shared: str = "shared_experts",
    attention: Mapping[str, str] = ATTENTION_NAMES,
    own: HfTensors | None = None,
    mixer: Callable[[int], HfTensors] | None = None,
) -> HfTensors:
    """Return a model's tensors; ``experts`` names gate, up and down of each expert in the module ``routed_mlp``.

    ``shared`` names the module of shared experts in it. ``own`` are tensors of a block that are stored in another way,
    ``mixer`` those of the attention of a layer, or of what it has instead.
    """
    names = {**norms, **({} if mixer else attention_names(config, attention))}

    def block(layer: int) -> HfTensors:
        return mlp(layer) | (own or {}) | (mixer(layer) if mixer else {})

    def mlp(layer: int) -> HfTensors:
        if layer not in config.routed_layers:
            names_of_mlp = MLP_NAMES | (MLP_BIAS_NAMES if config.mlp_bias else {})
            return base.whole_tensors(names | names_of_mlp)
        stacks = base.stacked_experts(f"{routed_mlp}.experts.", *experts, config) if routed_mlp else {}
        return stacks | base.whole_tensors(names | _routed_names(config, routed_mlp, shared))

    return base.model_tensors(config, OUTER_NAMES, "lm_head.weight", "model.layers.", block)


def attention_names(config: ModelConfig, attention: Mapping[str, str] = ATTENTION_NAMES) -> dict[str, str]:
    return {
        **attention,
        **(QKV_BIAS_NAMES if config.qkv_bias and attention else {}),
        **(PROJ_BIAS_NAMES if config.proj_bias else {}),
        **(QK_NORM_NAMES if config.qk_norm != "none" else {}),
    }


def _routed_names(config: ModelConfig, module: str, shared: str) -> dict[str, str]:
    names = {"router": f"{module}.gate.weight"}
    if config.choice_bias:
        names["choice_bias"] = f"{module}.gate.e_score_correction_bias"
    if config.shared_intermediate:
        names |= {f"shared.{part}": f"{module}.{shared}.{part}_proj.weight" for part in ("gate", "up", "down")}
    if config.shared_gate:
        names["shared_gate"] = f"{module}.{shared}_gate.weight"
    return names


def fused_rows(config: ModelConfig, name: str, rows: Mapping[str, int]) -> HfTensors:
    """Return matrices that are stored as the rows of one tensor, in order; ``rows`` are their numbers of rows."""
    starts = accumulate(rows.values(), initial=0)
    columns = (0, config.hidden)
    return {ours: (HfTensor(name, box=((start, start + n), columns)),)
            for (ours, n), start in zip(rows.items(), starts, strict=False)}  # fmt: skip


def fused_mlp(config: ModelConfig) -> HfTensors:
    """Return gate and up of a family that stores them as one tensor."""
    return fused_rows(config, "mlp.gate_up_proj.weight", dict.fromkeys(("gate", "up"), config.intermediate))


def interleaved(config: ModelConfig) -> HfTensors:
    """Return queries and keys of a family that rotates adjacent dimensions of a head; ours are half of them apart."""
    tensors: HfTensors = {}
    for part, n_heads in (("q", config.n_heads), ("k", config.n_kv_heads)):
        name = f"self_attn.{part}_proj"
        tensors[f"w{part}"] = _of_heads(config, f"{name}.weight", n_heads, ((0, config.hidden),))
        if config.qkv_bias:
            tensors[f"b{part}"] = _of_heads(config, f"{name}.bias", n_heads, ())
    return tensors


def even_then_odd(name: str, stored: int, ours: int, rotated: int, inner: Box) -> list[HfTensor]:
    """Return two slices of ``rotated`` rows from ``stored``, the even and the odd ones; ours are from ``ours``."""
    half, rows = rotated // 2, (stored, stored + rotated)
    return [
        HfTensor(name, box=((rows[0] + odd, rows[1]), *inner), at=((first, first + half), *inner), step=2)
        for odd, first in ((0, ours), (1, ours + half))
    ]


def _of_heads(config: ModelConfig, name: str, n_heads: int, inner: Box) -> tuple[HfTensor, ...]:
    size, rotated = config.head_dim, config.rotary_dims or config.head_dim
    parts: list[HfTensor] = []
    for start in range(0, n_heads * size, size):
        parts += even_then_odd(name, start, start, rotated, inner)
        if rotated < size:
            rest = ((start + rotated, start + size), *inner)
            parts.append(HfTensor(name, box=rest, at=rest))
    return tuple(parts)


def _llama_from_hf(hf: Mapping[str, Any], scalar_head: bool) -> ModelConfig:
    own: dict[str, Any] = {"mlp_bias": fields.flag(hf, "mlp_bias"), **attention_bias(hf)}
    return config_from_hf(hf, "llama", scalar_head, 2048, **own)


LLAMA = Family(
    "llama", "Llama", _llama_from_hf,
    lambda config: config_to_hf(config, attention_bias=config.qkv_bias, mlp_bias=config.mlp_bias), hf_tensors,
)  # fmt: skip
