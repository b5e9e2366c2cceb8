"""DeepSeek-V3 and Kimi K2: latent attention, and routed experts beside shared ones."""

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

from realhf.api.model_config import Latent, ModelConfig
from realhf.arch.families import llama
from realhf.arch.families.common import fields, routing
from realhf.arch.families.common.base import Family, HfTensor, HfTensors
from realhf.arch.families.common.rotary import parameters, rotary

NAMES = {
    "kv_a_norm.weight": "self_attn.kv_a_layernorm.weight",
    "wkv": "self_attn.kv_b_proj.weight",
    "wo": "self_attn.o_proj.weight",
}
Q_NAMES = {"q_a": "self_attn.q_a_proj.weight", "q_a_norm.weight": "self_attn.q_a_layernorm.weight"}
UNUSED = frozenset(["ep_size", "seq_aux", "aux_loss_alpha", "qk_head_dim", "auto_map"])


def _from_hf(hf: Mapping[str, Any], scalar_head: bool, family: str) -> ModelConfig:
    fields.require(hf, rope_interleave=True, moe_layer_freq=1, scoring_func="sigmoid", topk_method="noaux_tc")
    plain, rotated = fields.whole_number(hf, "qk_nope_head_dim", 128), fields.whole_number(hf, "qk_rope_head_dim", 64)
    has_q_rank = "q_lora_rank" not in hf or hf["q_lora_rank"] is not None
    q_rank = fields.whole_number(hf, "q_lora_rank", 1536) if has_q_rank else 0
    n_heads = fields.whole_number(hf, "num_attention_heads")
    if (n_kv := fields.whole_number(hf, "num_key_value_heads", n_heads)) != n_heads:
        raise ValueError(f"field 'num_key_value_heads' is {n_kv}, latent attention has one per query head: {n_heads}")
    if (value_dim := fields.whole_number(hf, "v_head_dim", 128)) > plain + rotated:
        raise ValueError(f"field 'v_head_dim' is {value_dim}, values that are wider than keys are not supported")
    if (head_dim := fields.whole_number(hf, "head_dim", rotated)) != rotated:  # transformers writes the rotated part
        raise ValueError(f"field 'head_dim' is {head_dim}, here it is the same as qk_rope_head_dim, {rotated}")
    own: dict[str, Any] = {
        "latent": Latent(fields.whole_number(hf, "kv_lora_rank", 512), value_dim, q_rank),
        "rotary_dims": rotated,
        "attention_scale": (plain + rotated) ** -0.5 * _score_factor(parameters(hf)),
        **llama.attention_bias(hf),
        **routing.from_hf(hf, n_experts=256, intermediate=2048, groups=(8, 4), n_dense=3, scale=2.5),
        "read_rotary": lambda n, _: rotary(hf, n),
    }
    sizes = fields.replaced(hf, head_dim=plain + rotated, num_key_value_heads=n_heads)
    return llama.config_from_hf(sizes, family, scalar_head, 4096, **own)


def _score_factor(stored: Mapping[str, Any]) -> float:
    """Return the factor of scores that YaRN has here beside that of cosines and sines."""
    kind, factor = stored.get("rope_type", stored.get("type", "default")), fields.number(stored, "factor", 1.0)
    scale = fields.number(stored, "mscale_all_dim", 0.0, minimum=0)
    return (1 + 0.1 * scale * math.log(factor)) ** 2 if kind != "default" and factor > 1 else 1.0


def _to_hf(config: ModelConfig) -> dict[str, Any]:
    assert config.latent is not None
    found, rotated = llama.config_to_hf(config), config.rotary_dims
    factor = dict(config.rotary_scaling).get("factor", 1.0)
    if factor > 1:
        growth = math.sqrt(config.attention_scale * config.head_dim**0.5) - 1
        scaling = {**found["rope_scaling"], "mscale_all_dim": round(growth / (0.1 * math.log(factor)), 9)}
        found |= {"rope_scaling": scaling, "rope_parameters": {"rope_theta": config.rotary_base, **scaling}}
    del found["head_dim"]
    return found | {
        "kv_lora_rank": config.latent.kv_rank,
        "q_lora_rank": config.latent.q_rank or None,
        "v_head_dim": config.latent.value_dim,
        "qk_nope_head_dim": config.head_dim - rotated,
        "qk_rope_head_dim": rotated,
        "attention_bias": config.qkv_bias,
        **routing.to_hf(config),
    }


def _tensors(config: ModelConfig) -> HfTensors:
    assert config.latent is not None
    kv_rank, q_rank = config.latent.kv_rank, config.latent.q_rank
    queries = "self_attn.q_b_proj" if q_rank else "self_attn.q_proj"
    stored = "self_attn.kv_a_proj_with_mqa"
    columns = ((0, q_rank or config.hidden),)
    own: HfTensors = {
        "wq": _rotary_first(config, f"{queries}.weight", columns),
        "kv_a": _rotary_last(config, f"{stored}.weight", kv_rank, ((0, config.hidden),)),
        **{ours: (HfTensor(theirs),) for ours, theirs in (NAMES | (Q_NAMES if q_rank else {})).items()},
    }
    if config.qkv_bias:
        own["b_kv_a"] = _rotary_last(config, f"{stored}.bias", kv_rank, ())
        own |= {"b_q_a": (HfTensor("self_attn.q_a_proj.bias"),)} if q_rank else {}
    if config.proj_bias:
        own["bo"] = (HfTensor("self_attn.o_proj.bias"),)
    return llama.hf_tensors(config, routed_mlp="mlp", attention={}, own=own)


def _rotary_first(config: ModelConfig, name: str, inner: tuple[tuple[int, int], ...]) -> tuple[HfTensor, ...]:
    """Return the rows of every head, which the stored tensor has behind those that are not rotated."""
    size, rotated = config.head_dim, config.rotary_dims
    parts: list[HfTensor] = []
    for start in range(0, config.n_heads * size, size):
        parts += llama.even_then_odd(name, start + size - rotated, start, rotated, inner)
        box = ((start, start + size - rotated), *inner)
        parts.append(HfTensor(name, box=box, at=((start + rotated, start + size), *inner)))
    return tuple(parts)


def _rotary_last(
    config: ModelConfig, name: str, kv_rank: int, inner: tuple[tuple[int, int], ...]
) -> tuple[HfTensor, ...]:
    latent = ((0, kv_rank), *inner)
    rotary_rows = llama.even_then_odd(name, kv_rank, kv_rank, config.rotary_dims, inner)
    return (HfTensor(name, box=latent, at=latent), *rotary_rows)


DEEPSEEK_V3 = Family(
    "deepseek_v3", "DeepseekV3", partial(_from_hf, family="deepseek_v3"), _to_hf, _tensors, unused=UNUSED,
    extra_layers=True,
)  # fmt: skip
KIMI_K2 = Family(
    "kimi_k2", "DeepseekV3", partial(_from_hf, family="kimi_k2"), _to_hf, _tensors, unused=UNUSED, extra_layers=True
)
