"""Phi-3 and Phi-4: Llama with fused tensors, partial rotary embeddings and LongRoPE."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from realhf.api.model_config import ModelConfig
from realhf.arch.families import llama
from realhf.arch.families.common import base, fields
from realhf.arch.families.common.base import Family, HfTensors
from realhf.arch.families.common.rotary import LONGROPE_NAMES, parameters, partial_rotary, partial_rotary_to_hf


def _phi3_from_hf(hf: Mapping[str, Any], scalar_head: bool) -> ModelConfig:
    fields.require(hf, lm_head_bias=False)
    kind = parameters(hf).get("rope_type", parameters(hf).get("type", "default"))
    if kind not in ("default", *LONGROPE_NAMES):
        raise ValueError(f"field 'rope_type' is {fields.shown(kind)}, which is not supported for this model_type, "
                         f"known are default, {', '.join(LONGROPE_NAMES)}")  # fmt: skip
    original = fields.whole_number(hf, "original_max_position_embeddings", 4096)
    read_rotary = partial(partial_rotary, hf, default=1.0, original=original, longrope_names=LONGROPE_NAMES)
    windows = base.equal_windows(hf, base.sliding_window(hf))
    return llama.config_from_hf(
        hf, "phi3", scalar_head, 4096, norm_eps=1e-5, read_rotary=read_rotary, sliding_windows=windows
    )


def _phi3_to_hf(config: ModelConfig) -> dict[str, Any]:
    rotary_fields = partial_rotary_to_hf(config)
    original = dict(config.rotary_scaling).get("original_max_position_embeddings", config.max_positions)
    return llama.config_to_hf(config, **base.sliding_window_to_hf(config)) | {
        **rotary_fields, "original_max_position_embeddings": original
    }  # fmt: skip


def _tensors(config: ModelConfig) -> HfTensors:
    heads = {"wq": config.n_heads, "wk": config.n_kv_heads, "wv": config.n_kv_heads}
    rows = {name: n * config.head_dim for name, n in heads.items()}
    qkv = llama.fused_rows(config, "self_attn.qkv_proj.weight", rows)
    return llama.hf_tensors(config, own={**qkv, **llama.fused_mlp(config)})


PHI3 = Family("phi3", "Phi3", _phi3_from_hf, _phi3_to_hf, _tensors,
              unused=frozenset(["resid_pdrop", "embd_pdrop", "full_attn_mod", "interpolate_factor"]))  # fmt: skip
