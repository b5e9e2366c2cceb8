"""The gated delta rule in configurations, and how its weights are stored: Qwen3-Next and families that share it."""

from collections.abc import Mapping
from itertools import accumulate
from typing import Any

from realhf.api.model_config import GatedDelta, ModelConfig
from realhf.api.param_box import Box
from realhf.arch.families.common import base, fields
from realhf.arch.families.common.base import HfTensor, HfTensors

LINEAR = "linear_attention"
NAMES = {
    "delta.a_log": "linear_attn.A_log",
    "delta.dt_bias": "linear_attn.dt_bias",
    "delta.norm": "linear_attn.norm.weight",
    "wo": "linear_attn.out_proj.weight",
}
SIZES = {
    "key_heads": ("linear_num_key_heads", 16),
    "value_heads": ("linear_num_value_heads", 32),
    "key_dim": ("linear_key_head_dim", 128),
    "value_dim": ("linear_value_head_dim", 128),
    "kernel": ("linear_conv_kernel_dim", 4),
}
"""Names in transformers, and defaults."""


def from_hf(hf: Mapping[str, Any]) -> dict[str, Any]:
    delta = GatedDelta(**{ours: fields.whole_number(hf, theirs, default) for ours, (theirs, default) in SIZES.items()})
    if delta.value_heads % delta.key_heads:
        raise ValueError(
            f"fields 'linear_num_value_heads' and 'linear_num_key_heads': {delta.value_heads} value heads are not a "
            f"multiple of {delta.key_heads} key heads"
        )
    if delta.kernel < 2:
        raise ValueError("field 'linear_conv_kernel_dim' is 1: a convolution of one token is not supported")
    n_layers, types = fields.whole_number(hf, "num_hidden_layers"), hf.get("layer_types")
    every = fields.whole_number(hf, "full_attention_interval", 4)
    if types is None:
        types = [LINEAR if (i + 1) % every else base.FULL for i in range(n_layers)]
    if not isinstance(types, list) or any(kind not in (LINEAR, base.FULL) for kind in types) or len(types) != n_layers:
        raise ValueError(
            f"field 'layer_types' must name {LINEAR} or {base.FULL} for {n_layers} layers, got {fields.shown(types)}"
        )
    if base.FULL not in types:
        raise ValueError(
            f"fields 'layer_types', 'num_hidden_layers' and 'full_attention_interval': none of {n_layers} layers has "
            f"{base.FULL}, without which transformers does not compute the model"
        )
    return {"delta": delta, "delta_layers": tuple(i for i, kind in enumerate(types) if kind == LINEAR)}


def to_hf(config: ModelConfig) -> dict[str, Any]:
    types = [LINEAR if i in config.delta_layers else base.FULL for i in range(config.n_layers)]
    return {"layer_types": types, **{theirs: getattr(config.delta, ours) for ours, (theirs, _) in SIZES.items()}}


def rows(name: str, sizes: Mapping[str, int], inner: Box, n_groups: int = 1) -> HfTensors:
    """Return weights that one tensor stores: in each of its groups of rows ``sizes`` rows of every weight, in order.

    ``inner`` are its other dimensions.
    """
    width, starts = sum(sizes.values()), accumulate(sizes.values(), initial=0)
    found: HfTensors = {}
    for (ours, size), first in zip(sizes.items(), starts, strict=False):
        spans = [(start + first, start + first + size) for start in range(0, n_groups * width, width)]
        ats = [(start, start + size) for start in range(0, n_groups * size, size)]
        found[ours] = tuple(HfTensor(name, (box, *inner), (at, *inner)) for box, at in zip(spans, ats, strict=True))
    return found


def tensors(config: ModelConfig, is_split: bool) -> HfTensors:
    """Return the tensors of a block with the rule; unless ``is_split``, heads of its products are stored together."""
    assert config.delta is not None
    delta, inner = config.delta, ((0, config.hidden),)
    conv = {"delta.conv_q": delta.keys, "delta.conv_k": delta.keys, "delta.conv_v": delta.values}
    found = base.whole_tensors(NAMES) | rows("linear_attn.conv1d.weight", conv, ((0, 1), (0, delta.kernel)))
    if is_split:
        qkv = {"delta.q": delta.keys, "delta.k": delta.keys, "delta.v": delta.values}
        others = {f"delta.{part}": f"linear_attn.in_proj_{part}.weight" for part in "zba"}
        return found | rows("linear_attn.in_proj_qkv.weight", qkv, inner) | base.whole_tensors(others)
    per_key = delta.value_heads // delta.key_heads
    values = per_key * delta.value_dim
    qkvz = {"delta.q": delta.key_dim, "delta.k": delta.key_dim, "delta.v": values, "delta.z": values}
    ba = {"delta.b": per_key, "delta.a": per_key}
    return {
        **found,
        **rows("linear_attn.in_proj_qkvz.weight", qkvz, inner, delta.key_heads),
        **rows("linear_attn.in_proj_ba.weight", ba, inner, delta.key_heads),
    }
