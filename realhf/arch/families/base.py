"""What a family declares: names and sizes of its Hugging Face twin. No tensors: the planner reads these files."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from realhf.api.model_config import ModelConfig
from realhf.api.param_box import Box

ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}
HF_ACTIVATIONS = {"silu": "silu", "gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh"}
SCALINGS = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}


@dataclass(frozen=True)
class HfTensor:
    """A Hugging Face tensor, or a part of one, that holds one of our parameters or a part of it.

    ``box`` is in that tensor's own coordinates (None: all of it); ``transpose`` when its rows are our columns. ``at``
    is the part of our parameter (None: all of it); where the tensor has fewer dimensions, its first ones have size 1.
    """

    name: str
    transpose: bool = False
    box: Box | None = None
    at: Box | None = None


HfTensors = dict[str, tuple[HfTensor, ...]]
"""The tensors that make up each of our parameters."""


@dataclass(frozen=True)
class Family:
    """One ``model_type``: its class names (language model, scalar head) and the translation both ways.

    ``base_prefix`` starts every name but the heads' and is absent in folders of a bare base model; tensors whose name
    ends with one of ``ignored`` are buffers of older versions, not weights.
    """

    name: str
    hf_architectures: tuple[str, str]
    base_prefix: str
    config_from_hf: Callable[[Mapping[str, Any], bool], ModelConfig]
    config_to_hf: Callable[[ModelConfig], dict[str, Any]]
    hf_tensors: Callable[[ModelConfig], HfTensors]
    ignored: tuple[str, ...] = ()

    def architecture(self, config: ModelConfig) -> str:
        return self.hf_architectures[config.head == "scalar"]


def whole_number(hf: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """Return a positive whole number; an absent or null field gives ``default``, or an error where that is None."""
    value = default if hf.get(key) is None else hf[key]
    if value is None:
        raise ValueError(f"field '{key}' is missing")
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"field '{key}' must be a positive whole number, got {value!r}")
    return value


def number(hf: Mapping[str, Any], key: str, default: float, least: float | None = None) -> float:
    """Return a positive number; with ``least``, one that is not below it."""
    value = default if hf.get(key) is None else hf[key]
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or (value <= 0 if least is None else value < least):
        kind = "a positive number" if least is None else f"a number of {least:g} or more"
        raise ValueError(f"field '{key}' must be {kind}, got {value!r}")
    return float(value)


def optional_number(hf: Mapping[str, Any], key: str, default: float) -> float:
    """Return a positive number, ``default`` where the field is absent and 0 where it is null: switched off."""
    return 0.0 if key in hf and hf[key] is None else number(hf, key, default)


def window(hf: Mapping[str, Any], default: int = 0) -> int:
    """Return the attention window; a null field switches it off, an absent one gives ``default``."""
    if hf.get("sliding_window", default or None) is None:
        return 0
    return whole_number(hf, "sliding_window", default or None)


def windows_by_layer(hf: Mapping[str, Any], width: int, slides: Callable[[int], bool]) -> tuple[int, ...]:
    """Return each layer's window: as ``layer_types`` says, else where ``slides``. Empty when no layer has one."""
    n_layers = whole_number(hf, "num_hidden_layers")
    kinds = hf.get("layer_types")
    if kinds is None:
        kinds = ["sliding_attention" if slides(i) else "full_attention" for i in range(n_layers)]
    unknown = set(kinds) - {"sliding_attention", "full_attention"}
    if unknown or len(kinds) != n_layers:
        raise ValueError(
            f"field 'layer_types' must say sliding_attention or full_attention of {n_layers} layers, got {kinds!r}"
        )
    if "sliding_attention" not in kinds or not width:
        return ()
    return tuple(width if kind == "sliding_attention" else 0 for kind in kinds)


def layer_types(config: ModelConfig) -> list[str]:
    return ["sliding_attention" if config.window(i) else "full_attention" for i in range(config.n_layers)]


def activation(hf: Mapping[str, Any], key: str, default: str) -> str:
    value = hf.get(key, default)
    if value not in ACTIVATIONS:
        raise ValueError(f"field '{key}' is {value!r}, known are {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[value]


def refuse(hf: Mapping[str, Any], **supported: Any) -> None:
    """Raise where a switch is set to something that this code does not compute; null counts as the supported value."""
    for key, only in supported.items():
        if hf.get(key) is not None and hf[key] != only:
            raise ValueError(f"field '{key}' is {hf[key]!r}, only {only!r} is supported")


def whole_tensors(names: Mapping[str, str]) -> HfTensors:
    """Return tensors that are our parameters as they stand, by our names."""
    return {ours: (HfTensor(theirs),) for ours, theirs in names.items()}


def stacked_experts(prefix: str, gate: str, up: str, down: str, config: ModelConfig) -> HfTensors:
    """Return the tensors of routed experts, which Hugging Face stores one by one under ``{prefix}{expert}.``."""
    hidden, wide = (0, config.hidden), (0, config.expert_intermediate)
    ups, downs = [], []
    for e in range(config.n_experts):
        for i, name in enumerate((gate, up)):
            ups.append(HfTensor(f"{prefix}{e}.{name}", box=(wide, hidden), at=((e, e + 1), (i, i + 1), wide, hidden)))
        downs.append(HfTensor(f"{prefix}{e}.{down}", box=(hidden, wide), at=((e, e + 1), hidden, wide)))
    return {"experts.up": tuple(ups), "experts.down": tuple(downs)}


def token_ids(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Return the special tokens as fields of ``ModelConfig``; Hugging Face allows one end token or a list."""
    eos = hf.get("eos_token_id")
    ends = () if eos is None else (eos,) if isinstance(eos, int) else tuple(eos)
    return {"bos_token_id": hf.get("bos_token_id"), "eos_token_ids": ends, "pad_token_id": hf.get("pad_token_id")}


def token_ids_to_hf(config: ModelConfig) -> dict[str, Any]:
    """Return the special tokens as Hugging Face fields.

    A scalar head needs a pad token: Hugging Face scores the last token that is not one. Where the model has none, it
    is never an end token, which our rows are scored at.
    """
    ends, pad = config.eos_token_ids, config.pad_token_id
    if config.head == "scalar" and pad is None:
        candidates = [config.bos_token_id, *range(len(ends) + 1)]
        pad = next(i for i in candidates if i is not None and i not in ends)
    eos = None if not ends else ends[0] if len(ends) == 1 else list(ends)
    return {"bos_token_id": config.bos_token_id, "eos_token_id": eos, "pad_token_id": pad}


def rotary(hf: Mapping[str, Any], base: float = 10000.0) -> tuple[float, tuple[tuple[str, float], ...]]:
    """Return base and scaling; version 5 keeps them in ``rope_parameters``, older ones in two fields."""
    new, old = hf.get("rope_parameters") or {}, hf.get("rope_scaling") or {}
    base = number(new if "rope_theta" in new else hf, "rope_theta", base)
    scaling = new or old
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return base, ()
    if kind not in SCALINGS:
        raise ValueError(f"rotary scaling '{kind}' is not supported, known are default, {', '.join(SCALINGS)}")
    missing = [key for key in SCALINGS[kind] if key not in scaling]
    if missing:
        raise ValueError(f"rotary scaling '{kind}' lacks {', '.join(missing)}")
    return base, tuple((key, float(scaling[key])) for key in SCALINGS[kind])


def rotary_to_hf(config: ModelConfig) -> dict[str, Any]:
    """Return the rotary fields in both spellings, for versions before and after 5."""
    scaling: dict[str, Any] = {"rope_type": "default"}
    if config.rotary_scaling:
        values = dict(config.rotary_scaling)
        kind = next(kind for kind, keys in SCALINGS.items() if set(keys) == set(values))
        whole_ones = {key: int(value) for key, value in values.items() if key == "original_max_position_embeddings"}
        scaling = {"rope_type": kind, **values, **whole_ones}
    return {
        "rope_theta": config.rotary_base,
        "rope_scaling": scaling if config.rotary_scaling else None,
        "rope_parameters": {"rope_theta": config.rotary_base, **scaling},
    }
