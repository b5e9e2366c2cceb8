"""What a family declares: the names and sizes of its Hugging Face models. No tensors, since the planner reads it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from realhf.api.model_config import ModelConfig
from realhf.api.param_box import Box

TANH_GELUS = ("gelu_new", "gelu_fast", "gelu_pytorch_tanh")
ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu": "gelu", **dict.fromkeys(TANH_GELUS, "gelu_tanh")}
HF_ACTIVATIONS = {"silu": "silu", "gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh"}
SCALINGS = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}


@dataclass(frozen=True)
class HfTensor:
    """A Hugging Face tensor, or a slice of one, that stores one of our parameters or a slice of it.

    ``box`` is in the stored tensor's coordinates, ``at`` in our parameter's (None: all of it). Leading dimensions of
    ``at`` that the stored tensor lacks have size 1. ``transpose``: its rows are our columns.
    """

    name: str
    transpose: bool = False
    box: Box | None = None
    at: Box | None = None


HfTensors = dict[str, tuple[HfTensor, ...]]
"""The stored tensors of each of our parameters."""


@dataclass(frozen=True)
class Family:
    """One ``model_type``: its class names and the translation of configurations and tensors in both directions.

    ``base_prefix`` starts every tensor name except the heads' and is absent in folders of a bare base model. Tensors
    whose name ends with one of ``ignored`` are buffers of older versions, not weights.
    """

    name: str
    class_prefix: str  # of LlamaForCausalLM: Llama
    config_from_hf: Callable[[Mapping[str, Any], bool], ModelConfig]
    config_to_hf: Callable[[ModelConfig], dict[str, Any]]
    hf_tensors: Callable[[ModelConfig], HfTensors]
    base_prefix: str = "model."
    ignored: tuple[str, ...] = ("rotary_emb.inv_freq",)
    lm_class: str = "ForCausalLM"

    def architecture(self, config: ModelConfig) -> str:
        return self.class_prefix + ("ForSequenceClassification" if config.head == "scalar" else self.lm_class)


def whole_number(hf: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """Return a positive integer; an absent or null field gives ``default``, or ValueError if that is None."""
    value = default if hf.get(key) is None else hf[key]
    if value is None:
        raise ValueError(f"field '{key}' is missing")
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"field '{key}' must be a positive whole number, got {value!r}")
    return value


def number(hf: Mapping[str, Any], key: str, default: float, minimum: float | None = None) -> float:
    """Return a positive number or, with ``minimum``, a number that is at least that."""
    value = default if hf.get(key) is None else hf[key]
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or (value <= 0 if minimum is None else value < minimum):
        kind = "a positive number" if minimum is None else f"a number of {minimum:g} or more"
        raise ValueError(f"field '{key}' must be {kind}, got {value!r}")
    return float(value)


def optional_number(hf: Mapping[str, Any], key: str, default: float) -> float:
    """Return a positive number, ``default`` for an absent field, 0 for a null one (disabled)."""
    return 0.0 if key in hf and hf[key] is None else number(hf, key, default)


def sliding_window(hf: Mapping[str, Any], default: int = 0) -> int:
    """Return the attention window; a null field disables it, an absent one gives ``default``."""
    if hf.get("sliding_window", default or None) is None:
        return 0
    return whole_number(hf, "sliding_window", default or None)


def sliding_windows(hf: Mapping[str, Any], width: int, slides: Callable[[int], bool]) -> tuple[int, ...]:
    """Return the window of each layer, by ``layer_types`` or else by ``slides``; empty if no layer has one."""
    n_layers = whole_number(hf, "num_hidden_layers")
    types = hf.get("layer_types")
    if types is None:
        types = ["sliding_attention" if slides(i) else "full_attention" for i in range(n_layers)]
    if set(types) - {"sliding_attention", "full_attention"} or len(types) != n_layers:
        raise ValueError(
            f"field 'layer_types' must name sliding_attention or full_attention for {n_layers} layers, got {types!r}"
        )
    if "sliding_attention" not in types or not width:
        return ()
    return tuple(width if layer_type == "sliding_attention" else 0 for layer_type in types)


def sliding_window_to_hf(config: ModelConfig) -> dict[str, Any]:
    return {"sliding_window": max(config.sliding_windows, default=0) or None}


def layer_types(config: ModelConfig) -> list[str]:
    return ["sliding_attention" if config.sliding_window(i) else "full_attention" for i in range(config.n_layers)]


def activation(hf: Mapping[str, Any], key: str, default: str) -> str:
    value = hf.get(key, default)
    if value not in ACTIVATIONS:
        raise ValueError(f"field '{key}' is {value!r}, known are {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[value]


def require(hf: Mapping[str, Any], **supported: Any) -> None:
    """Raise ValueError for fields with a value that is not supported; null counts as the supported value."""
    for key, only in supported.items():
        if hf.get(key) is not None and hf[key] != only:
            raise ValueError(f"field '{key}' is {hf[key]!r}, only {only!r} is supported")


def sizes_from_hf(
    hf: Mapping[str, Any], keys: Mapping[str, str], scalar_head: bool, tied: bool = False, head_dim: int | None = None
) -> dict[str, Any]:
    """Read the fields of ``ModelConfig`` that all families have; ``keys`` are the names of the required sizes.

    Without ``head_dim`` the number of heads must divide the hidden size.
    """
    sizes: dict[str, Any] = {ours: whole_number(hf, theirs) for ours, theirs in keys.items()}
    if head_dim is None and sizes["hidden"] % sizes["n_heads"]:
        hidden, n_heads = keys["hidden"], keys["n_heads"]
        raise ValueError(f"field '{hidden}' is {hf[hidden]}, not a multiple of {n_heads} ({hf[n_heads]})")
    eos = hf.get("eos_token_id")  # Hugging Face allows one end token or a list
    return sizes | {
        "head_dim": head_dim or sizes["hidden"] // sizes["n_heads"],
        "head": "scalar" if scalar_head else "lm",
        "tied_embedding": bool(hf.get("tie_word_embeddings", tied)) and not scalar_head,
        "init_std": number(hf, "initializer_range", 0.02),
        "bos_token_id": hf.get("bos_token_id"),
        "eos_token_ids": () if eos is None else (eos,) if isinstance(eos, int) else tuple(eos),
        "pad_token_id": hf.get("pad_token_id"),
    }


def sizes_to_hf(config: ModelConfig, keys: Mapping[str, str]) -> dict[str, Any]:
    return {
        **{theirs: getattr(config, ours) for ours, theirs in keys.items()},
        "tie_word_embeddings": config.tied_embedding and config.head == "lm",
        "initializer_range": config.init_std,
        **_token_ids_to_hf(config),
    }


def whole_tensors(names: Mapping[str, str]) -> HfTensors:
    """Return the tensors of parameters that are stored unchanged, by our names."""
    return {ours: (HfTensor(theirs),) for ours, theirs in names.items()}


def model_tensors(
    config: ModelConfig, outer: Mapping[str, str], lm_head: str, layers: str, block: Callable[[int], HfTensors]
) -> HfTensors:
    """Return the tensors of a model, by our names.

    ``outer`` are the names of embedding and final norm. ``block`` returns the tensors of a layer, whose names are
    relative to ``layers`` followed by its number.
    """
    names = dict(outer)
    if config.head == "scalar":
        names["head.weight"] = "score.weight"
    elif not config.tied_embedding:
        names["head.weight"] = lm_head
    tensors = whole_tensors(names)
    for i in range(config.n_layers):
        for ours, parts in block(i).items():
            tensors[f"layers.{i}.{ours}"] = tuple(replace(part, name=f"{layers}{i}.{part.name}") for part in parts)
    return tensors


def stacked_experts(prefix: str, gate: str, up: str, down: str, config: ModelConfig) -> HfTensors:
    """Return the tensors of routed experts, which Hugging Face stores separately under ``{prefix}{expert}.``."""
    hidden, wide = (0, config.hidden), (0, config.expert_intermediate)
    ups, downs = [], []
    for e in range(config.n_experts):
        for i, name in enumerate((gate, up)):
            ups.append(HfTensor(f"{prefix}{e}.{name}", box=(wide, hidden), at=((e, e + 1), (i, i + 1), wide, hidden)))
        downs.append(HfTensor(f"{prefix}{e}.{down}", box=(hidden, wide), at=((e, e + 1), hidden, wide)))
    return {"experts.up": tuple(ups), "experts.down": tuple(downs)}


def _token_ids_to_hf(config: ModelConfig) -> dict[str, Any]:
    """Return the special tokens as Hugging Face fields.

    A scalar head needs a pad token, since Hugging Face scores the last token that is not padding. A model without one
    gets a token that is not an end token: rows are scored at their end token.
    """
    ends, pad = config.eos_token_ids, config.pad_token_id
    if config.head == "scalar" and pad is None:
        candidates = [config.bos_token_id, *range(len(ends) + 1)]
        pad = next(i for i in candidates if i is not None and i not in ends)
    eos = None if not ends else ends[0] if len(ends) == 1 else list(ends)
    return {"bos_token_id": config.bos_token_id, "eos_token_id": eos, "pad_token_id": pad}


def rotary(hf: Mapping[str, Any], base: float = 10000.0) -> tuple[float, tuple[tuple[str, float], ...]]:
    """Return base and scaling; transformers 5 stores them in ``rope_parameters``, older versions in two fields."""
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
    """Return the rotary fields as transformers 5 and as older versions name them."""
    scaling: dict[str, Any] = {"rope_type": "default"}
    if config.rotary_scaling:
        values = dict(config.rotary_scaling)
        kind = next(kind for kind, keys in SCALINGS.items() if set(keys) == set(values))
        integers = {key: int(value) for key, value in values.items() if key == "original_max_position_embeddings"}
        scaling = {"rope_type": kind, **values, **integers}
    return {
        "rope_theta": config.rotary_base,
        "rope_scaling": scaling if config.rotary_scaling else None,
        "rope_parameters": {"rope_theta": config.rotary_base, **scaling},
    }
