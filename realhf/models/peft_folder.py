"""PEFT folders: adapters in the files of the library peft, ``adapter_config.json`` and ``adapter_model.safetensors``.

A matrix B has the rows of its module, so those of ours are where ``hf_folder`` finds the rows of their weights. PEFT
adapts the experts of a layer as two parameters. The wrapper of the second contains that of the first, and the expert is
the fastest dimension of B's columns.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from realhf.api.model_config import ModelConfig
from realhf.api.param_box import Box, intersect, relative, whole
from realhf.arch.lora import LoraModule, adapter_of, b_name, lora_modules, own_specs
from realhf.arch.param_specs import param_specs
from realhf.models.flat_params import FlatParams
from realhf.models.hf_folder import StoredSlices, hf_head, replaced_folder, stored_slices

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
EXPERTS = {"gate_up_proj": ".base_layer", "down_proj": ""}  # where PEFT nests the adapters of the experts' parameters
SUPPORTED = {
    "peft_type": "LORA", "bias": "none", "use_dora": False, "use_rslora": False, "lora_bias": False,
    "layers_to_transform": None, "layer_replication": None, "trainable_token_indices": None, "use_qalora": False,
    "fan_in_fan_out": None, "use_bdlora": None, "alora_invocation_tokens": None,
}  # fmt: skip
"""Fields of which only this value is supported (None: see ``_check_config``)."""


def is_peft_folder(folder: Path | str) -> bool:
    return Path(folder, CONFIG).is_file()


def save_peft(
    folder: Path | str,
    config: ModelConfig,
    read: Callable[[str], Tensor],
    base: str,
    tokenizer_folder: Path | str | None,
) -> None:
    """Write the adapters as a PEFT folder, whose base model is ``base``; ``read`` returns a whole parameter by name."""
    own = {spec.name: read(spec.name).detach().cpu() for spec in own_specs(config)}
    stored = stored_slices(config)
    tensors: dict[str, Tensor] = {}
    for module in lora_modules(config):
        key = _key(module)
        a = own[module.a]
        bs = [own[b_name(weight)] for weight in module.weights]
        if _is_of_experts(module):
            b = bs[0].flatten(1, -2)
            tensors[f"{key}.lora_A.weight"] = a.flatten(0, 1)
            tensors[f"{key}.lora_B.weight"] = b.permute(1, 2, 0).flatten(1, 2)
            continue
        tensors[f"{key}.lora_A.weight"] = a
        tensors[f"{key}.lora_B.weight"] = b = a.new_empty(sum(map(len, bs)), a.shape[0])
        for weight, ours in zip(module.weights, bs, strict=True):
            for at, rows in _rows(stored, weight):
                b[slice(*rows)] = ours[slice(*at)]
    if "head.weight" in own:
        tensors[PREFIX + hf_head(config)] = own["head.weight"]
    with replaced_folder(folder, tokenizer_folder) as new:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, new / WEIGHTS, {"format": "pt"})
        (new / CONFIG).write_text(json.dumps(_config_json(config, base), indent=2) + "\n")


def _key(module: LoraModule) -> str:
    if not _is_of_experts(module):
        return PREFIX + module.path
    parent, _, name = module.path.rpartition(".")
    return PREFIX + parent + EXPERTS[name]


def _is_of_experts(module: LoraModule) -> bool:
    return ".experts." in module.path


def _rows(stored: StoredSlices, weight: str) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    """Yield the rows of our weight, and the rows of the module's weight ``[out, in]`` that store them."""
    for part in stored[weight]:
        yield part.at[0], part.box[1] if part.transpose else part.box[0]


def _config_json(config: ModelConfig, base: str) -> dict[str, Any]:
    assert config.lora is not None
    lora, modules = config.lora, lora_modules(config)
    experts = sorted({f"experts.{m.name}" for m in modules if _is_of_experts(m)})
    rank, alpha = lora.rank, lora.rank * lora.scaling
    doubled = {f".*\\.{m.name}" for m in modules if m.rank_factor == 2}
    transposed = any(part.transpose for m in modules for part in stored_slices(config)[m.weights[0]])
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM" if config.head == "lm" else "SEQ_CLS",
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": transposed,
        "target_modules": sorted({m.name for m in modules if not _is_of_experts(m)}),
        "target_parameters": [f"mlp.{name}" for name in experts] or None,
        "rank_pattern": dict.fromkeys(sorted(doubled), 2 * rank),
        "alpha_pattern": dict.fromkeys(sorted(doubled), 2 * alpha),
        "modules_to_save": [hf_head(config).removesuffix(".weight")] if config.head == "scalar" else None,
        "inference_mode": True,
        "init_lora_weights": True,
    }


def load_peft(folder: Path, config: ModelConfig, params: FlatParams) -> None:
    """Fill the adapters of ``params`` from a PEFT folder; ValueError for other modules, ranks or kinds of adapters."""
    if not is_peft_folder(folder):
        raise ValueError(f"'{folder}' has no {CONFIG}: lora.init_from takes a folder of PEFT adapters")
    _check_config(folder, config)
    with safe_open(folder / WEIGHTS, framework="pt") as file:
        found, wanted = set(file.keys()), _wanted(config)
        if missing := sorted(wanted - found):
            raise ValueError(
                f"'{folder}' lacks {len(missing)} tensors of the adapters of lora.targets: {missing[0]}, ..."
            )
        if unknown := sorted(found - wanted):
            raise ValueError(f"'{folder}' has {len(unknown)} tensors without an adapter of ours: {unknown[0]}, ...; "
                             "see lora.targets")  # fmt: skip
        _read_adapters(file, config, params)


def _check_config(folder: Path, config: ModelConfig) -> None:
    assert config.lora is not None
    fields = json.loads((folder / CONFIG).read_text())
    for key, only in SUPPORTED.items():
        if only is not None and fields.get(key, only) != only or only is None and fields.get(key) and key[0] != "f":
            raise ValueError(f"'{folder}': {key} is {fields[key]!r} in {CONFIG}, which is not supported")
    expected = _config_json(config, "")
    for key in ("rank_pattern", "alpha_pattern"):
        if any(expected[key].get(name) != value for name, value in (fields.get(key) or {}).items()):
            raise ValueError(f"'{folder}': {key} is {fields[key]!r} in {CONFIG}, supported is {expected[key]!r}")
    rank, alpha = fields.get("r"), fields.get("lora_alpha")
    if rank != config.lora.rank or alpha != config.lora.rank * config.lora.scaling:
        raise ValueError(f"'{folder}' has rank {rank} and alpha {alpha}: set lora.rank={rank} lora.alpha={alpha}")


def _wanted(config: ModelConfig) -> set[str]:
    keys = {f"{_key(module)}.lora_{half}.weight" for module in lora_modules(config) for half in "AB"}
    return keys | ({PREFIX + hf_head(config)} if config.head == "scalar" else set())


def _read_adapters(file: Any, config: ModelConfig, params: FlatParams) -> None:
    stored, shapes = stored_slices(config), {spec.name: spec.shape for spec in own_specs(config)}
    names = set(params.names)

    def write(name: str, value: Tensor, at: Box | None = None) -> None:
        if tuple(value.shape) != tuple(stop - start for start, stop in (at or whole(shapes[name]))):
            raise ValueError(f"the adapter of {name} has shape {list(value.shape)}, expected {list(shapes[name])}")
        if name in names and (ours := intersect(at or whole(shapes[name]), params.box(name))) is not None:
            params.write(name, ours, value[relative(ours, at or whole(shapes[name]))])

    for module in lora_modules(config):
        a, b = (file.get_tensor(f"{_key(module)}.lora_{half}.weight").float() for half in "AB")
        if _is_of_experts(module):
            name, rank = b_name(module.weights[0]), shapes[module.a][1]
            a, b = a.unflatten(0, (config.n_experts, -1)), b.unflatten(1, (-1, config.n_experts)).permute(2, 0, 1)
            more = max(0, rank - a.shape[1])  # adapters of a smaller rank have no effect in the rest
            write(module.a, F.pad(a, (0, 0, 0, more)))
            write(name, F.pad(b, (0, more)).reshape(shapes[name]))
            continue
        write(module.a, a)
        for weight in module.weights:
            for at, rows in _rows(stored, weight):
                write(b_name(weight), b[slice(*rows)], (at, (0, b.shape[1])))
    if config.head == "scalar":
        write("head.weight", file.get_tensor(PREFIX + hf_head(config)).float())


def merged_names(config: ModelConfig) -> Iterator[str]:
    """Yield the parameters that ``merged_parameter`` reads for all parameters of the model, in its order."""
    for spec in param_specs(config):
        yield spec.name
        if (module := adapter_of(config).get(spec.name)) is not None:
            yield from (module.a, b_name(spec.name))


@torch.no_grad()
def merged_parameter(config: ModelConfig, read: Callable[[str], Tensor], name: str) -> Tensor:
    """Return a parameter with its adapter: W + scaling * B @ A, in the type of W."""
    weight = read(name)
    module = adapter_of(config).get(name)
    if module is None or config.lora is None:
        return weight
    a, b = read(module.a), read(b_name(name))
    if weight.dim() == 4:  # gate and up of every expert
        a = a[:, None]
    return (weight.float() + config.lora.scaling * (b.float() @ a.float())).to(weight.dtype)
