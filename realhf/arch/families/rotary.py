"""Rotary embeddings in configurations: base, scaling and rotated dimensions, in all spellings of transformers.

``ModelConfig.rotary_scaling`` has every parameter of a scaling, so the computation needs no defaults.
"""

import math
from collections.abc import Mapping
from typing import Any

from realhf.api.model_config import ModelConfig
from realhf.arch.families import fields

SCALINGS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow", "truncate",
             "mscale", "mscale_all_dim"),
    "longrope": ("short_factor", "long_factor", "original_max_position_embeddings", "attention_factor", "factor"),
}  # fmt: skip
KEYS = {
    "rope_type",
    "type",
    "rope_theta",
    "partial_rotary_factor",
    *(key for keys in SCALINGS.values() for key in keys),
}


def rotary(hf: Mapping[str, Any], max_positions: int, base: float = 10000.0, share: float = 1.0) -> dict[str, Any]:
    """Return the fields ``rotary_base`` and ``rotary_scaling`` of ``ModelConfig``; ``share`` of a head is rotated.

    As in transformers 5, ``rope_scaling`` is read instead of ``rope_parameters`` if both are set, and a base in either
    is read instead of that in ``rope_theta``.
    """
    stored = parameters(hf)
    kind = stored.get("rope_type", stored.get("type", "default"))
    if not isinstance(kind, str) or kind not in SCALINGS:
        raise ValueError(f"rotary scaling {fields.shown(kind)} is not supported, known are {', '.join(SCALINGS)}")
    if unknown := sorted(set(stored) - KEYS):
        raise ValueError(f"rotary scaling '{kind}' has the unknown field '{unknown[0]}'")
    fields.require(stored, partial_rotary_factor=share)
    if (base := fields.number(stored, "rope_theta", fields.number(hf, "rope_theta", base))) <= 1:
        raise ValueError(f"field 'rope_theta' must exceed 1, got {base:g}")
    return {
        "rotary_base": base,
        "rotary_scaling": _scaling(kind, stored, hf, max_positions),
    }


def parameters(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Return the rotary parameters of a configuration as stored; ValueError if they are not an object."""
    new = hf.get("rope_parameters")
    stored = hf.get("rope_scaling") or new or {}
    if not isinstance(stored, dict):
        raise ValueError(f"rotary parameters must be an object, got {fields.shown(stored)}")
    return stored


def _scaling(kind: str, stored: dict[str, Any], hf: Mapping[str, Any], max_positions: int) -> tuple[Any, ...]:
    """Return the parameters of a scaling with the defaults of transformers, in the order of ``SCALINGS``."""
    if kind == "default":
        return ()
    values: dict[str, Any] = {"rope_type": kind}
    if "original_max_position_embeddings" in SCALINGS[kind]:
        # a field outside of the parameters is read instead of the one inside
        where = hf if hf.get("original_max_position_embeddings") is not None else stored
        key = "original_max_position_embeddings"
        values[key] = fields.whole_number(where, key, max_positions)
    if kind == "longrope":
        values |= {key: _numbers(stored, key) for key in ("short_factor", "long_factor")}
    in_context = max_positions / values.get("original_max_position_embeddings", max_positions)
    default = in_context if kind == "longrope" or ("factor" in stored and kind == "yarn") else None
    values["factor"] = fields.number(stored, "factor", default)
    if kind == "llama3":
        values |= {key: fields.number(stored, key) for key in ("low_freq_factor", "high_freq_factor")}
        if values["low_freq_factor"] >= values["high_freq_factor"]:
            raise ValueError(f"field 'high_freq_factor' must exceed low_freq_factor, got {values['high_freq_factor']}")
    if kind == "yarn":
        values |= {
            "beta_fast": fields.number(stored, "beta_fast", 32),
            "beta_slow": fields.number(stored, "beta_slow", 1),
        }
        values["truncate"] = fields.flag(stored, "truncate", True)
    if "attention_factor" in SCALINGS[kind]:
        values["attention_factor"] = fields.number(stored, "attention_factor", _attention_factor(values, stored))
    return tuple(values.items())


def _attention_factor(values: Mapping[str, Any], stored: Mapping[str, Any]) -> float:
    """Return the default scale of cosines and sines: YaRN (arXiv 2309.00071, section 3.4), LongRoPE (2402.13753)."""
    factor = values["factor"]
    if values["rope_type"] == "longrope":
        longer = math.log(factor) / math.log(values["original_max_position_embeddings"]) if factor > 1 else 0.0
        return math.sqrt(1 + longer)
    scales = [fields.number(stored, key, 0.0, minimum=0) for key in ("mscale", "mscale_all_dim")]
    over, under = scales if all(scales) else (1.0, 0.0)
    growth = math.log(factor) if factor > 1 else 0.0
    return (0.1 * over * growth + 1) / (0.1 * under * growth + 1)


def _numbers(stored: Mapping[str, Any], key: str) -> tuple[float, ...]:
    values = stored.get(key)
    if not isinstance(values, list):
        raise ValueError(f"field '{key}' must be a list of numbers, got {fields.shown(values)}")
    return tuple(fields.number({key: value}, key) for value in values)


def rotary_to_hf(config: ModelConfig) -> dict[str, Any]:
    """Return the rotary fields as transformers 5 and as older versions name them."""
    scaling = dict(config.rotary_scaling) or {"rope_type": "default"}
    return {
        "rope_theta": config.rotary_base,
        "rope_scaling": scaling if config.rotary_scaling else None,
        "rope_parameters": {"rope_theta": config.rotary_base, **scaling},
    }
