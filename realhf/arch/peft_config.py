"""The files of the library peft: the fields of ``adapter_config.json``, and names and shapes of tensors. Torch-free."""

import json
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
EXPERTS = {"gate_up_proj": ".base_layer", "down_proj": ""}  # where PEFT nests the adapters of the experts' parameters
SUPPORTED = {
    "peft_type": "LORA", "bias": "none", "use_dora": False, "use_rslora": False, "lora_bias": False,
    "use_qalora": False, "layers_to_transform": None, "layer_replication": None, "trainable_token_indices": None,
    "use_bdlora": None, "alora_invocation_tokens": None,
}  # fmt: skip
"""Fields of which only this value is supported (None, also 0 and an empty one)."""


def adapter_key(module: LoraModule) -> str:
    """Return the start of the names of a module's tensors, which end with ``.lora_A.weight`` and ``.lora_B.weight``."""
    if not module.is_of_experts:
        return PREFIX + module.path
    parent, _, name = module.path.rpartition(".")
    return PREFIX + parent + EXPERTS[name]


def head_key(config: ModelConfig) -> str:
    """Return the name of a scalar head, which is saved whole."""
    return PREFIX + FAMILIES[config.family].hf_tensors(config)["head.weight"][0].name


def _shapes(config: ModelConfig) -> dict[str, list[int]]:
    """Return the shapes of all tensors; empty for those of experts, whose rank may be smaller than ours."""
    own = {spec.name: spec.shape for spec in own_specs(config)}
    shapes: dict[str, list[int]] = {head_key(config): list(own["head.weight"])} if config.head == "scalar" else {}
    for module in lora_modules(config):
        a, b = list(own[module.a]), [sum(own[b_name(weight)][0] for weight in module.weights), own[module.a][0]]
        pairs = zip("AB", ([], []) if module.is_of_experts else (a, b), strict=True)
        shapes |= {f"{adapter_key(module)}.lora_{half}.weight": shape for half, shape in pairs}
    return shapes


def check_adapter(folder: Path, config: ModelConfig) -> None:
    """Raise ValueError unless a PEFT folder has the adapters of a model: kinds, ranks, names and shapes of tensors."""
    check_adapter_config(folder, config)
    expected = _shapes(config)
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
        if shape and found[name] != shape:
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


def check_adapter_config(folder: Path, config: ModelConfig) -> None:
    """Raise ValueError unless a PEFT folder has adapters like those of a model."""
    assert config.lora is not None
    file = folder / ADAPTER_CONFIG
    if not file.is_file():
        raise ValueError(f"'{folder}' has no {ADAPTER_CONFIG}: lora.init_from takes a folder of PEFT adapters")
    with damage_reported(file, "save the adapters again"):
        fields = json.loads(file.read_text(encoding="utf-8"))
    for key, only in SUPPORTED.items():
        value = fields.get(key, only)
        if value != only and (only or value):  # null, 0 and nothing are the same
            raise ValueError(f"'{folder}': {key} is {fields[key]!r} in {ADAPTER_CONFIG}, which is not supported")
    expected = adapter_config(config, "")
    for key in ("rank_pattern", "alpha_pattern"):
        if any(expected[key].get(name) != value for name, value in (fields.get(key) or {}).items()):
            raise ValueError(
                f"'{folder}': {key} is {fields[key]!r} in {ADAPTER_CONFIG}, supported is {expected[key]!r}"
            )
    rank, alpha = fields.get("r"), fields.get("lora_alpha")
    if rank != config.lora.rank or alpha != config.lora.alpha:
        raise ValueError(f"'{folder}' has rank {rank} and alpha {alpha}: set lora.rank={rank} lora.alpha={alpha}")
