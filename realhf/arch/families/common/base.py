"""What a family declares: the names and sizes of its Hugging Face models. No tensors, since the planner reads it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from realhf.api.model_config import ModelConfig
from realhf.api.param_box import Box
from realhf.arch.families.common import fields

TANH_GELUS = ("gelu_new", "gelu_fast", "gelu_pytorch_tanh", "gelu_accurate", "gelu_python_tanh")
SAME_NAME = (
    "silu",
    "gelu",
    "quick_gelu",
    "relu",
    "relu2",
    "relu6",
    "leaky_relu",
    "mish",
    "hardswish",
    "sigmoid",
    "tanh",
)
ACTIVATIONS = {**dict.fromkeys(TANH_GELUS, "gelu_tanh"), "swish": "silu", **{name: name for name in SAME_NAME}}
SLIDING, FULL = "sliding_attention", "full_attention"


@dataclass(frozen=True)
class HfTensor:
    """A Hugging Face tensor, or a slice of one, that stores one of our parameters or a slice of it.

    ``box`` is in the stored tensor's coordinates, ``at`` in our parameter's (None: all of it). ``dims`` are our
    dimensions in the order of the stored ones, by default the last ones; others have size 1 in ``at``. Along the stored
    dimension ``step_dim`` only every ``step``-th element of ``box``, from the first, belongs to the slice.
    """

    name: str
    box: Box | None = None
    at: Box | None = None
    dims: tuple[int, ...] | None = None
    step: int = 1
    step_dim: int = 0


TRANSPOSED = (1, 0)
HfTensors = dict[str, tuple[HfTensor, ...]]
"""The stored tensors of each of our parameters."""


@dataclass(frozen=True)
class Family:
    """One ``model_type``: its class names and the translation of configurations and tensors in both directions.

    ``base_prefix`` starts every tensor name except the heads' and is absent in folders of a bare base model. Tensors
    whose name ends with one of ``ignored`` are buffers of older versions, not weights. No version of the model class
    reads the fields ``unused``. ``scalar_class`` is the class with a scalar head if its name differs. ``extra_layers``:
    folders may have layers after the last one that predict further tokens, which are not read.
    """

    name: str
    class_prefix: str  # of LlamaForCausalLM: Llama
    config_from_hf: Callable[[Mapping[str, Any], bool], ModelConfig]
    config_to_hf: Callable[[ModelConfig], dict[str, Any]]
    hf_tensors: Callable[[ModelConfig], HfTensors]
    base_prefix: str = "model."
    ignored: tuple[str, ...] = ("rotary_emb.inv_freq",)
    lm_class: str = "ForCausalLM"
    scalar_class: str = ""
    extra_layers: bool = False
    unused: frozenset[str] = frozenset()

    def architecture(self, config: ModelConfig) -> str:
        if config.head == "scalar":
            return self.scalar_class or f"{self.class_prefix}ForSequenceClassification"
        return self.class_prefix + self.lm_class


def sliding_window(hf: Mapping[str, Any], default: int | None = None) -> int:
    """Return the attention window; a null field disables it, an absent one gives ``default``."""
    return 0 if hf.get("sliding_window", default) is None else fields.whole_number(hf, "sliding_window", default)


def sliding_windows(hf: Mapping[str, Any], width: int, slides: Callable[[int], bool]) -> tuple[int, ...]:
    """Return the window of each layer, by ``layer_types`` or else by ``slides``; empty if no layer has one."""
    n_layers = fields.whole_number(hf, "num_hidden_layers")
    types = hf.get("layer_types")
    if types is None:
        types = [SLIDING if width and slides(i) else FULL for i in range(n_layers)]
    if not isinstance(types, list) or any(kind not in (SLIDING, FULL) for kind in types) or len(types) != n_layers:
        raise ValueError(
            f"field 'layer_types' must name {SLIDING} or {FULL} for {n_layers} layers, got {fields.shown(types)}"
        )
    if SLIDING in types and not width:
        raise ValueError(f"field 'layer_types' has {SLIDING}, but the model has no sliding window")
    return tuple(width if kind == SLIDING else 0 for kind in types) if SLIDING in types else ()


def all_but_every(step: int, hf: Mapping[str, Any], width: int) -> tuple[int, ...]:
    """Return ``sliding_windows`` of a family whose every ``step``-th layer has none by default.

    The layers with a window have other rotary embeddings, so a null one does not say which layers these are.
    """
    if not width and hf.get("layer_types") is None:
        raise ValueError("field 'sliding_window' is None and there are no 'layer_types': they also set the rotary "
                         "embeddings of this model_type")  # fmt: skip
    return sliding_windows(hf, width, lambda layer: (layer + 1) % step != 0)


def equal_windows(hf: Mapping[str, Any], width: int = 0) -> tuple[int, ...]:
    """Return the windows of a family whose layers all have the same; ``layer_types`` must agree."""
    windows = sliding_windows(hf, width, lambda layer: True)
    if width and set(windows) != {width}:
        raise ValueError("field 'layer_types' differs between layers, but this model_type has one window for all")
    return windows


def sliding_window_to_hf(config: ModelConfig) -> dict[str, Any]:
    return {"sliding_window": max(config.sliding_windows, default=0) or None}


def window_by_layer_to_hf(config: ModelConfig) -> dict[str, Any]:
    """Return the fields of a family that reads windows by layer; a model without windows has one that no layer uses.

    Transformers does not read null.
    """
    return {
        "sliding_window": max(config.sliding_windows, default=config.max_positions),
        "layer_types": layer_types(config),
    }


def layer_types(config: ModelConfig) -> list[str]:
    return [SLIDING if config.sliding_window(i) else FULL for i in range(config.n_layers)]


def activation(hf: Mapping[str, Any], key: str, default: str) -> str:
    value = hf.get(key, default)
    if not isinstance(value, str) or value not in ACTIVATIONS:
        raise ValueError(f"field '{key}' is {fields.shown(value)}, known are {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[value]


def activation_to_hf(config: ModelConfig) -> str:
    return "gelu_pytorch_tanh" if config.activation == "gelu_tanh" else config.activation


def sizes_from_hf(
    hf: Mapping[str, Any], keys: Mapping[str, str], scalar_head: bool, tied: bool = False, head_dim: int | None = None
) -> dict[str, Any]:
    """Read the fields of ``ModelConfig`` that all families have; ``keys`` are the names of the required sizes.

    Without ``head_dim`` the number of heads must divide the hidden size.
    """
    sizes: dict[str, Any] = {ours: fields.whole_number(hf, theirs) for ours, theirs in keys.items()}
    if head_dim is None and sizes["hidden"] % sizes["n_heads"]:
        hidden, n_heads = keys["hidden"], keys["n_heads"]
        raise ValueError(f"field '{hidden}' is {hf[hidden]}, not a multiple of {n_heads} ({hf[n_heads]})")
    return sizes | {
        "head_dim": head_dim or sizes["hidden"] // sizes["n_heads"],
        "head": "scalar" if scalar_head else "lm",
        "tied_embedding": fields.flag(hf, "tie_word_embeddings", tied) and not scalar_head,
        "init_std": fields.number(hf, "initializer_range", 0.02, minimum=0),
        "bos_token_id": fields.token_id(hf, "bos_token_id"),
        "eos_token_ids": fields.token_ids(hf, "eos_token_id"),
        "pad_token_id": fields.token_id(hf, "pad_token_id"),
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
