"""The files of the library peft: the fields of ``adapter_config.json``, and names and shapes of tensors. Torch-free."""

import json
from math import prod
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from realhf.api.model_config import ModelConfig
from realhf.arch.families import FAMILIES
from realhf.arch.families.common.base import TRANSPOSED
from realhf.arch.lora import LoraModule, b_name, lora_modules, own_specs
from realhf.base.errors import damage_reported

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
FIRST_OF_EXPERTS = "gate_up_proj"
"""Of two adapted parameters of the experts PEFT nests this one in the wrapper of the other."""
SUPPORTED = {
    "peft_type": "LORA", "bias": "none", "use_dora": False, "use_rslora": False, "lora_bias": False,
    "use_qalora": False, "layers_to_transform": None, "layer_replication": None, "trainable_token_indices": None,
    "use_bdlora": None, "alora_invocation_tokens": None,
}  # fmt: skip
"""Fields of which only this value is supported (None, also 0 and an empty one)."""
PATTERNS = ("rank_pattern", "alpha_pattern")
CHANGE_BASE = ("pissa", "corda", "olora", "loftq", "lora_ga")
"""Starts of ``init_lora_weights`` that take a part out of the base's weights: adapters are for what is left of it."""


def adapter_key(config: ModelConfig, module: LoraModule) -> str:
    """Return the start of the names of a module's tensors, which end with ``.lora_A.weight`` and ``.lora_B.weight``."""
    if not module.is_of_experts:
        return PREFIX + module.path
    parent, _, name = module.path.rpartition(".")
    is_alone = sum(other.path.startswith(f"{parent}.") for other in lora_modules(config)) == 1
    return f"{PREFIX}{parent}{'.base_layer' if name == FIRST_OF_EXPERTS and not is_alone else ''}"


def head_key(config: ModelConfig) -> str:
    """Return the name of a scalar head, which is saved whole."""
    return PREFIX + FAMILIES[config.family].hf_tensors(config)["head.weight"][0].name


def _shapes(config: ModelConfig, has_patterns: bool) -> dict[str, list[int]]:
    """Return the shapes of all tensors. Without patterns a fused parameter of experts has the rank of the others."""
    assert config.lora is not None
    own = {spec.name: spec.shape for spec in own_specs(config)}
    shapes: dict[str, list[int]] = {head_key(config): list(own["head.weight"])} if config.head == "scalar" else {}
    for module in lora_modules(config):
        a, b = list(own[module.a]), [sum(own[b_name(weight)][0] for weight in module.weights), own[module.a][0]]
        if module.is_of_experts:
            n_rows = config.n_experts * config.lora.rank * (module.rank_factor if has_patterns else 1)
            a, b = [n_rows, a[-1]], [prod(own[b_name(module.weights[0])][1:-1]), n_rows]
        key = f"{adapter_key(config, module)}.lora_"
        shapes |= {f"{key}A.weight": a, f"{key}B.weight": b}
    return shapes


def check_adapter(folder: Path, config: ModelConfig) -> None:
    """Raise ValueError unless a PEFT folder has the adapters of a model: kinds, ranks, names and shapes of tensors."""
    expected = _shapes(config, check_adapter_config(folder, config))
    try:
        with safe_open(folder / ADAPTER_WEIGHTS, framework="np") as file:
            names = file.keys()
            found = {name: list(file.get_slice(name).get_shape()) for name in names}
    except (OSError, SafetensorError) as error:
        raise ValueError(f"'{folder}': {ADAPTER_WEIGHTS} is missing or damaged ({error})") from error
    if missing := sorted(expected.keys() - found.keys()):
        raise ValueError(f"'{folder}' lacks {len(missing)} tensors of the model's adapters: {missing[0]}, ...; "
                         "see lora.targets")  # fmt: skip
    if unknown := sorted(found.keys() - expected.keys()):
        raise ValueError(f"'{folder}' has {len(unknown)} tensors without a module of the model: {unknown[0]}, ...; "
                         "see lora.targets")  # fmt: skip
    for name, shape in expected.items():
        if found[name] != shape:
            raise ValueError(f"'{folder}': tensor '{name}' has shape {found[name]}, the model needs {shape}")


def adapter_config(config: ModelConfig, base: str) -> dict[str, Any]:
    """Return the fields of ``adapter_config.json`` for a model's adapters; ``base`` is the name of their base model."""
    assert config.lora is not None
    lora, modules = config.lora, lora_modules(config)
    experts = sorted({f"experts.{m.name}" for m in modules if m.is_of_experts})
    rank, alpha = lora.rank, lora.alpha
    doubled = {f".*\\.{m.name}" for m in modules if m.rank_factor == 2}
    stored = FAMILIES[config.family].hf_tensors(config)
    transposed = any(part.dims == TRANSPOSED for m in modules for part in stored[m.weights[0]])
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM" if config.head == "lm" else "SEQ_CLS",
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": lora.dropout,
        "bias": "none",
        "fan_in_fan_out": transposed,
        "target_modules": sorted({m.name for m in modules if not m.is_of_experts}),
        "target_parameters": [f"mlp.{name}" for name in experts] or None,
        "rank_pattern": dict.fromkeys(sorted(doubled), 2 * rank),
        "alpha_pattern": dict.fromkeys(sorted(doubled), 2 * alpha),
        "modules_to_save": [stored["head.weight"][0].name.removesuffix(".weight")] if config.head == "scalar" else None,
        "inference_mode": True,
        "init_lora_weights": True,
    }


def check_adapter_config(folder: Path, config: ModelConfig) -> bool:
    """Raise ValueError unless a PEFT folder has adapters like those of a model; return whether it has rank patterns."""
    assert config.lora is not None
    file = folder / ADAPTER_CONFIG
    if not file.is_file():
        raise ValueError(f"'{folder}' has no {ADAPTER_CONFIG}: lora.init_from takes a folder of PEFT adapters")
    with damage_reported(file, "save the adapters again"):
        fields: dict[str, Any] = {**json.loads(file.read_text(encoding="utf-8"))}
    for key, only in SUPPORTED.items():
        value = fields.get(key, only)
        if value != only and (only or value):  # null, 0 and nothing are the same
            raise ValueError(f"'{folder}': {key} is {fields[key]!r} in {ADAPTER_CONFIG}, which is not supported")
    start = fields.get("init_lora_weights")
    if str(start).lower().startswith(CHANGE_BASE):
        raise ValueError(f"'{folder}': init_lora_weights is {start!r} in {ADAPTER_CONFIG}, so its adapters belong to a "
                         "changed base; save them with PEFT's path_initial_model_for_weight_conversion")  # fmt: skip
    found, expected = ([one.get(key) or {} for key in PATTERNS] for one in (fields, adapter_config(config, "")))
    if found not in (expected, [{}, {}]):  # one without the other is another scaling
        raise ValueError(f"'{folder}': {' and '.join(PATTERNS)} are {found[0]!r} and {found[1]!r} in {ADAPTER_CONFIG}, "
                         f"supported are {expected[0]!r} and {expected[1]!r}")  # fmt: skip
    rank, alpha = fields.get("r"), fields.get("lora_alpha")
    if rank != config.lora.rank or alpha != config.lora.alpha:
        raise ValueError(f"'{folder}' has rank {rank} and alpha {alpha}: set lora.rank={rank} lora.alpha={alpha}")
    return bool(found[0])
