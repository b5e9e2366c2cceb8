"""Rotary embeddings in configurations: base, scaling and rotated dimensions, in all spellings of transformers.

``ModelConfig.rotary_scaling`` has every parameter of a scaling, so the computation needs no defaults.
"""

import math
from collections.abc import Mapping
from typing import Any

from realhf.api.model_config import ModelConfig
from realhf.arch.families.common import fields

SCALINGS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow", "truncate",
             "mscale", "mscale_all_dim"),
    "longrope": ("short_factor", "long_factor", "original_max_position_embeddings", "attention_factor", "factor"),
}  # fmt: skip
LONGROPE_NAMES = ("longrope", "su", "yarn")
"""What Phi-3 calls LongRoPE."""
KEYS = {
    "rope_type",
    "type",
    "rope_theta",
    "partial_rotary_factor",
    *(key for keys in SCALINGS.values() for key in keys),
}


def rotary(hf: Mapping[str, Any], max_positions: int, base: float = 10000.0) -> dict[str, Any]:
    """Return the fields ``rotary_base`` and ``rotary_scaling`` of ``ModelConfig``.

    As in transformers 5, ``rope_scaling`` is read instead of ``rope_parameters`` if both are set, and a base in either
    is read instead of that in ``rope_theta``.
    """
    return _fields(parameters(hf), hf, max_positions, base)


def rotary_by_layer_type(
    hf: Mapping[str, Any], max_positions: int, base: float, windowed_base: float, windowed_key: str = ""
) -> dict[str, Any]:
    """Return the rotary fields of a family whose ``rope_parameters`` are given by layer type.

    ``windowed_key`` is an older field for the base of layers with a window.
    """
    by_type = hf.get("rope_parameters") or {}
    if not isinstance(by_type, dict) or set(by_type) - {"full_attention", "sliding_attention"}:
        raise ValueError(f"field 'rope_parameters' must have full_attention and sliding_attention, "
                         f"got {fields.shown(by_type)}")  # fmt: skip
    full, windowed, older = by_type.get("full_attention"), by_type.get("sliding_attention"), hf.get("rope_scaling")
    for stored in (full, windowed, older):
        if stored is not None and not isinstance(stored, dict):
            raise ValueError(f"fields 'rope_parameters' and 'rope_scaling' have objects, got {fields.shown(stored)}")
    if older and "rope_type" not in older and "type" in older:
        raise ValueError("field 'rope_scaling' has 'type' without 'rope_type', which versions of transformers read "
                         "differently for this model_type")  # fmt: skip
    stored = {**(full or {}), **(older or {})}
    fields.require(stored, truncate=True)  # versions of transformers differ: 5 reads it outside of the layer types
    outer = fields.replaced(hf, original_max_position_embeddings=None)  # read inside of the layer types only
    found = _fields(stored, outer, max_positions, base)
    local = {windowed_key: hf[windowed_key]} if windowed_key and hf.get(windowed_key) is not None else {}
    windowed_base = fields.number(local, windowed_key, windowed_base) if local else windowed_base
    own = _fields(windowed or {}, {}, max_positions, windowed_base)
    if own["rotary_scaling"]:
        raise ValueError("field 'rope_parameters' has a scaling for sliding_attention, which is not supported")
    is_same = own["rotary_base"] == found["rotary_base"] and not found["rotary_scaling"]
    return {**found, "windowed_rotary_base": 0.0 if is_same else own["rotary_base"]}


def _fields(
    stored: dict[str, Any],
    hf: Mapping[str, Any],
    max_positions: int,
    base: float,
    share: float = 1.0,
    original: int = 0,
) -> dict[str, Any]:
    key = "rope_type" if "rope_type" in stored else "type"
    kind = stored.get(key, "default")
    if not isinstance(kind, str) or kind not in SCALINGS:
        raise ValueError(f"field '{key}' is {fields.shown(kind)}, known are {', '.join(SCALINGS)}")
    if unknown := sorted(set(stored) - KEYS):
        raise ValueError(f"rotary scaling '{kind}' has the unknown field '{unknown[0]}'")
    fields.require(stored, partial_rotary_factor=share)
    if (base := fields.number(stored, "rope_theta", fields.number(hf, "rope_theta", base))) <= 1:
        raise ValueError(f"field 'rope_theta' must exceed 1, got {base:g}")
    return {
        "rotary_base": base,
        "rotary_scaling": _scaling(kind, stored, hf, max_positions, original),
    }


def partial_rotary(
    hf: Mapping[str, Any],
    max_positions: int,
    head_dim: int,
    default: float,
    base: float = 10000.0,
    original: int = 0,
    longrope_names: tuple[str, ...] = (),
) -> dict[str, Any]:
    """Return the rotary fields of a family that rotates a share of a head, by ``default`` this one.

    ``longrope_names`` are names of LongRoPE. ``original`` is the default of ``original_max_position_embeddings`` in a
    family that reads only the field outside of the parameters.
    """
    outer = fields.number(hf, "partial_rotary_factor", default)
    share = fields.number(parameters(hf), "partial_rotary_factor", outer)
    if not (dims := int(head_dim * share)):
        raise ValueError(f"field 'partial_rotary_factor' or 'rotary_pct' is {share}: no dimension of a head with "
                         f"{head_dim} is rotary")  # fmt: skip
    stored = parameters(hf)
    if stored.get("rope_type", stored.get("type")) in longrope_names:
        stored = {**stored, "rope_type": "longrope"}
    found = _fields(stored, hf, max_positions, base, share, original)
    return {**found, "rotary_dims": 0 if dims == head_dim else dims}


def partial_rotary_to_hf(config: ModelConfig) -> dict[str, Any]:
    share = (config.rotary_dims or config.head_dim) / config.head_dim
    found = rotary_to_hf(config)
    found["rope_parameters"]["partial_rotary_factor"] = share
    return found | {"partial_rotary_factor": share}


def parameters(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Return the rotary parameters of a configuration as stored; ValueError if they are not an object."""
    new, older = hf.get("rope_parameters"), hf.get("rope_scaling")
    stored = older or new or {}
    if not isinstance(stored, dict):
        name = "rope_scaling" if older else "rope_parameters"
        raise ValueError(f"field '{name}' must be an object, got {fields.shown(stored)}")
    return stored


def _scaling(
    kind: str, stored: dict[str, Any], hf: Mapping[str, Any], max_positions: int, original: int
) -> tuple[Any, ...]:
    """Return the parameters of a scaling with the defaults of transformers, in the order of ``SCALINGS``."""
    if kind == "default":
        return ()
    values: dict[str, Any] = {"rope_type": kind}
    if "original_max_position_embeddings" in SCALINGS[kind]:
        # a field outside of the parameters is read instead of the one inside
        where = hf if original or hf.get("original_max_position_embeddings") is not None else stored
        key = "original_max_position_embeddings"
        values[key] = fields.whole_number(where, key, original or max_positions)
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
    if values is None:
        raise ValueError(f"field '{key}' is missing")
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


def rotary_by_layer_type_to_hf(config: ModelConfig) -> dict[str, Any]:
    windowed = {"rope_type": "default", "rope_theta": config.windowed_rotary_base or config.rotary_base}
    by_type = {"full_attention": rotary_to_hf(config)["rope_parameters"], "sliding_attention": windowed}
    return rotary_to_hf(config) | {"rope_parameters": by_type}
