"""Command R7B and Command A (Cohere 2): parallel blocks with one norm, rotary embeddings only in windowed layers."""

from collections.abc import Mapping
from typing import Any

from realhf.api.model_config import ModelConfig
from realhf.arch.families import llama
from realhf.arch.families.common import base, fields
from realhf.arch.families.common.base import Family, HfTensors

FIXED = {
    "order_of_interleaved_layers": "local_attn_first", "position_embedding_type": "rope_gptj", "rotary_pct": 1.0,
    "use_embedding_sharing": True, "use_gated_activation": True, "use_parallel_block": True,
    "use_parallel_embedding": True,
}  # fmt: skip
"""Fields of released folders that no version of the class reads."""
NORM_NAMES = {"attn_norm.weight": "input_layernorm.weight"}


def _from_hf(hf: Mapping[str, Any], scalar_head: bool) -> ModelConfig:
    fields.require(hf, **FIXED)
    step = fields.whole_number(hf, "sliding_window_pattern", 4)  # of older versions, without ``layer_types``
    windows = base.all_but_every(step, hf, base.sliding_window(hf, 4096))
    n_layers = fields.whole_number(hf, "num_hidden_layers")
    own: dict[str, Any] = {
        "norm": "layer",
        "norm_bias": False,
        "shared_norm": True,
        "parallel_residual": True,
        "sliding_windows": windows,
        "unrotated_layers": tuple(i for i in range(n_layers) if not (windows and windows[i])),
        "logit_scale": fields.number(hf, "logit_scale", 0.0625),
        "norm_eps_key": "layer_norm_eps",
        **llama.attention_bias(hf),
    }
    return llama.config_from_hf(hf, "cohere2", scalar_head, 8192, norm_eps=1e-5, tied=True, **own)


def _to_hf(config: ModelConfig) -> dict[str, Any]:
    found = llama.config_to_hf(config)
    del found["rms_norm_eps"]
    return found | {
        **base.window_by_layer_to_hf(config),
        "layer_norm_eps": config.norm_eps,
        "logit_scale": config.logit_scale,
        "attention_bias": config.qkv_bias,
    }


def _tensors(config: ModelConfig) -> HfTensors:
    return llama.hf_tensors(config, NORM_NAMES, own=llama.interleaved(config))


COHERE2 = Family("cohere2", "Cohere2", _from_hf, _to_hf, _tensors)
