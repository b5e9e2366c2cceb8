"""Read the sizes of a Hugging Face model from its folder or its ``config.json``."""

import json
from pathlib import Path

from realhf.api.model_config import ModelConfig
from realhf.arch.families import FAMILIES
from realhf.arch.families.common.base import Family
from realhf.arch.families.common.fields import HfFields, refuse_unread
from realhf.arch.weight_formats import check_format
from realhf.base.errors import did_you_mean

TEXT_PART = "text_config"
OUTER_FIELDS = ("bos_token_id", "eos_token_id", "pad_token_id", "tie_word_embeddings", "quantization_config")
"""Fields of the text part that a multimodal configuration may have outside of it; that of ties is read there first."""


def read_hf_config(path: Path | str, scalar_head: bool, text_only: bool = False) -> ModelConfig:
    """Read a model's sizes from its folder or its ``config.json``; ValueError for a missing or invalid one.

    With ``text_only`` these are the sizes of the text part of a multimodal model.
    """
    path = Path(path)
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise ValueError(f"no model configuration at '{file}': give a Hugging Face folder or its config.json")
    try:
        hf = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"'{file}' is not valid JSON: {error}") from error
    model_type = hf.get("model_type") if isinstance(hf, dict) else None
    if isinstance(hf, dict) and isinstance(hf.get(TEXT_PART), dict):
        if not text_only:
            raise ValueError(f"'{file}': {model_type} is a multimodal model; text_only=True uses its text part "
                             f"(actor.text_only=True, model.text_only=True)")  # fmt: skip
        outer = {key: hf[key] for key in OUTER_FIELDS if key in hf}
        hf = {**outer, **hf[TEXT_PART], **{key: outer[key] for key in ("tie_word_embeddings",) if key in outer}}
        model_type = hf.get("model_type")
    elif text_only:
        raise ValueError(f"'{file}': text_only=True, but {model_type} has no '{TEXT_PART}': it is a text model")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        hint = did_you_mean(str(model_type), FAMILIES)
        raise ValueError(f"'{file}': unknown model_type {model_type!r}, known are {', '.join(FAMILIES)}{hint}")
    try:
        return _read(HfFields(hf), FAMILIES[model_type], scalar_head)
    except (ValueError, ArithmeticError) as error:
        raise ValueError(f"'{file}': {error}") from error


def _read(hf: HfFields, family: Family, scalar_head: bool) -> ModelConfig:
    config = family.config_from_hf(hf, scalar_head)
    if (options := hf.get("quantization_config")) is not None:
        check_format(options)
    refuse_unread(hf, family.unused)
    rotary_dims = config.rotary_dims or config.head_dim
    if config.n_heads % config.n_kv_heads:
        raise ValueError(f"field 'num_key_value_heads' is {config.n_kv_heads}: {config.n_heads} query heads are not a "
                         f"multiple of {config.n_kv_heads}")  # fmt: skip
    if not config.learned_positions and (rotary_dims % 2 or rotary_dims > config.head_dim):
        raise ValueError(f"rotary dimensions must be even and at most {config.head_dim}, got {rotary_dims}: head_dim "
                         "times partial_rotary_factor or rotary_pct")  # fmt: skip
    if rotary_dims == 2 and ("rope_type", "dynamic") in config.rotary_scaling:
        raise ValueError("field 'rope_type' is 'dynamic', which needs more than 2 rotary dimensions of a head")
    for key, value in config.rotary_scaling:
        if isinstance(value, tuple) and len(value) != rotary_dims // 2:
            raise ValueError(f"field '{key}' must have {rotary_dims // 2} numbers, got {len(value)}")
    if config.n_experts and not 1 <= config.experts_per_token <= config.n_experts:
        raise ValueError(f"field 'num_experts_per_tok' is {config.experts_per_token}, the model has "
                         f"{config.n_experts} experts")  # fmt: skip
    return config
