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
from realhf.arch.lora import adapter_of, b_name, lora_modules, own_specs
from realhf.arch.param_specs import param_specs
from realhf.arch.peft_config import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    adapter_config,
    adapter_key,
    check_adapter,
    head_key,
)
from realhf.models.flat_params import FlatParams
from realhf.models.hf_folder import StoredSlice, StoredSlices, replaced_folder, stored_slices
from realhf.models.low_rank import merged


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
        key = adapter_key(config, module)
        a = own[module.a]
        bs = [own[b_name(weight)] for weight in module.weights]
        if module.is_of_experts:
            b = bs[0].flatten(1, -2)
            tensors[f"{key}.lora_A.weight"] = a.flatten(0, 1)
            tensors[f"{key}.lora_B.weight"] = b.permute(1, 2, 0).flatten(1, 2)
            continue
        tensors[f"{key}.lora_A.weight"] = a
        tensors[f"{key}.lora_B.weight"] = b = a.new_empty(sum(map(len, bs)), a.shape[0])
        for weight, ours in zip(module.weights, bs, strict=True):
            for part in stored[weight]:
                b[slice(*_rows(part), part.step)] = ours[slice(*part.at[0])]
    if "head.weight" in own:
        tensors[head_key(config)] = own["head.weight"]
    with replaced_folder(folder, tokenizer_folder) as new:
        save_file(
            {name: tensor.contiguous() for name, tensor in tensors.items()}, new / ADAPTER_WEIGHTS, {"format": "pt"}
        )
        (new / ADAPTER_CONFIG).write_text(json.dumps(adapter_config(config, base), indent=2) + "\n")


def peft_slices(config: ModelConfig) -> StoredSlices:
    """Return where PEFT stores the adapters of a model without routed experts."""
    stored, shapes = stored_slices(config), {spec.name: spec.shape for spec in own_specs(config)}
    slices: StoredSlices = {}
    for module in lora_modules(config):
        name, shape = f"{adapter_key(config, module)}.lora_{{}}.weight", whole(shapes[module.a])
        slices[module.a] = (StoredSlice(name.format("A"), shape, shape, (0, 1)),)
        for b in module.weights:
            slices[b_name(b)] = tuple(
                StoredSlice(name.format("B"), (part.at[0], shape[0]), (_rows(part), shape[0]), (0, 1), part.step)
                for part in stored[b]
            )
    return slices


def _rows(part: StoredSlice) -> tuple[int, int]:
    """Return the rows of the module's weight ``[out, in]`` that store a slice of ours."""
    return part.box[part.dims.index(0)]


def load_peft(folder: Path, config: ModelConfig, params: FlatParams) -> None:
    """Fill the adapters of ``params`` from a PEFT folder; ValueError for other modules, ranks or kinds of adapters."""
    check_adapter(folder, config)
    with safe_open(folder / ADAPTER_WEIGHTS, framework="pt") as file:
        _read_adapters(file, config, params)


def _read_adapters(file: Any, config: ModelConfig, params: FlatParams) -> None:
    stored, shapes = stored_slices(config), {spec.name: spec.shape for spec in own_specs(config)}
    names = set(params.names)

    def write(name: str, value: Tensor, at: Box | None = None) -> None:
        if tuple(value.shape) != tuple(stop - start for start, stop in (at or whole(shapes[name]))):
            raise ValueError(f"the adapter of {name} has shape {list(value.shape)}, expected {list(shapes[name])}")
        if name in names and (ours := intersect(at or whole(shapes[name]), params.box(name))) is not None:
            params.write(name, ours, value[relative(ours, at or whole(shapes[name]))])

    for module in lora_modules(config):
        a, b = (file.get_tensor(f"{adapter_key(config, module)}.lora_{half}.weight").float() for half in "AB")
        if module.is_of_experts:
            name, rank = b_name(module.weights[0]), shapes[module.a][1]
            a, b = a.unflatten(0, (config.n_experts, -1)), b.unflatten(1, (-1, config.n_experts)).permute(2, 0, 1)
            more = max(0, rank - a.shape[1])  # adapters of a smaller rank have no effect in the rest
            write(module.a, F.pad(a, (0, 0, 0, more)))
            write(name, F.pad(b, (0, more)).reshape(shapes[name]))
            continue
        write(module.a, a)
        for weight in module.weights:
            for part in stored[weight]:
                write(b_name(weight), b[slice(*_rows(part), part.step)], (part.at[0], (0, b.shape[1])))
    if config.head == "scalar":
        write("head.weight", file.get_tensor(head_key(config)).float())


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
    return merged(weight, a, b, config.lora.scaling)
