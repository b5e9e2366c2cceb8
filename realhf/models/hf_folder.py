"""Hugging Face folders: read the slices that a shard needs, write whole models, start from nothing."""

import json
import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from realhf.api.model_config import ModelConfig
from realhf.api.param_box import Box, ParamSpec, box_shape, intersect, relative, whole
from realhf.arch.families import FAMILIES
from realhf.arch.families.base import HfTensor, HfTensors
from realhf.arch.param_specs import param_specs
from realhf.base.seeds import stable_seed
from realhf.models.flat_params import FlatParams

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
TOKENIZER_FILES = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab*",
    "merges.txt",
    "chat_template*",
    "generation_config.json",
)
HEADS = ("lm_head.", "embed_out.", "score.", "classifier.", "v_head.")


class _Folder:
    """The tensors of a folder by name, whatever files they are in. Use as a context manager."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._stack = ExitStack()
        self._files: dict[str, Any] = {}
        self._file_of = self._index()

    def _index(self) -> dict[str, str]:
        if (self.path / INDEX).is_file():
            return json.loads((self.path / INDEX).read_text())["weight_map"]
        if (self.path / SINGLE).is_file():
            with safe_open(self.path / SINGLE, framework="pt") as file:
                return dict.fromkeys(file.keys(), SINGLE)
        if list(self.path.glob("*.bin")):
            raise ValueError(f"'{self.path}' holds pickled .bin weights, which are not read: convert to safetensors")
        raise ValueError(f"'{self.path}' holds neither {SINGLE} nor {INDEX}")

    def __enter__(self) -> "_Folder":
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    @property
    def names(self) -> set[str]:
        return set(self._file_of)

    def slice(self, name: str) -> Any:
        """Return a lazy handle on a tensor: ``get_shape()``, and indexing reads."""
        file = self._file_of[name]
        if file not in self._files:
            if not (self.path / file).is_file():
                raise ValueError(f"'{self.path}' lacks '{file}', which its index names")
            self._files[file] = self._stack.enter_context(safe_open(self.path / file, framework="pt"))
        return self._files[file].get_slice(name)


@dataclass(frozen=True)
class _Part:
    """Where a part of one of our parameters is stored: what is ``at`` in ours is ``box`` of the tensor ``name``."""

    name: str
    at: Box
    box: Box
    transpose: bool

    @staticmethod
    def of(tensor: HfTensor, shape: tuple[int, ...]) -> "_Part":
        box = tensor.box or whole(shape[::-1] if tensor.transpose else shape)
        return _Part(tensor.name, tensor.at or whole(shape), box, tensor.transpose)

    def theirs(self, ours: Box) -> tuple[slice, ...]:
        """Return where a box inside ``at`` is in the stored tensor."""
        inner = [(start - base, stop - base) for (start, stop), (base, _) in zip(ours, self.at, strict=True)]
        inner = inner[len(inner) - len(self.box) :]
        pairs = zip(inner[::-1] if self.transpose else inner, self.box, strict=True)
        return tuple(slice(start + base, stop + base) for (start, stop), (base, _) in pairs)


Parts = dict[str, tuple[_Part, ...]]


def parts_of_parameters(specs: Mapping[str, ParamSpec], tensors: HfTensors) -> Parts:
    """Return where each of our parameters is stored."""
    return {name: tuple(_Part.of(t, specs[name].shape) for t in several) for name, several in tensors.items()}


def hf_shapes(parts: Parts) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor of which there are parts."""
    shapes: dict[str, tuple[int, ...]] = {}
    for part in (part for several in parts.values() for part in several):
        stops = tuple(stop for _, stop in part.box)
        shapes[part.name] = tuple(map(max, shapes.get(part.name, stops), stops))
    return shapes


def load_hf(
    folder: Path | str, config: ModelConfig, params: FlatParams, seed: int, allow_missing: frozenset[str] = frozenset()
) -> None:
    """Fill ``params`` from a folder of safetensors, reading only the slices that it holds.

    Parameters in ``allow_missing`` that the folder lacks (a new scalar head) are drawn from ``seed``. Raises
    ValueError for other missing tensors, tensors that the architecture does not know, and shapes that differ.
    """
    family = FAMILIES[config.family]
    parts = parts_of_parameters({spec.name: spec for spec in param_specs(config)}, family.hf_tensors(config))
    shapes = hf_shapes(parts)
    with _Folder(Path(folder)) as source:
        stored = _stored_names(source, set(shapes), family.base_prefix)
        _check_names(source, stored, parts, allow_missing, family.ignored)
        for name in params.names:
            if parts[name][0].name not in stored:
                _draw(config, params, name, seed)
                continue
            for part in parts[name]:
                ours = intersect(part.at, params.box(name))
                if ours is not None:
                    handle = source.slice(stored[part.name])
                    _check_shape(source, stored[part.name], tuple(handle.get_shape()), shapes[part.name])
                    params.write(name, ours, _read(handle, part, ours))


def _check_shape(source: _Folder, name: str, found: tuple[int, ...], expected: tuple[int, ...]) -> None:
    if found != expected:
        raise ValueError(
            f"'{source.path}': tensor '{name}' has shape {list(found)}, the configuration says {list(expected)}"
        )


def _stored_names(source: _Folder, wanted: set[str], prefix: str) -> dict[str, str]:
    """Map each wanted name to the folder's own; a bare base model is saved without the prefix."""
    spellings = {name: (name, name.removeprefix(prefix)) for name in wanted}
    return {name: s for name, both in spellings.items() for s in both[::-1] if s in source.names}


def _check_names(
    source: _Folder,
    stored: Mapping[str, str],
    parts: Parts,
    allow_missing: frozenset[str],
    ignored: tuple[str, ...],
) -> None:
    needed = {part.name for ours, several in parts.items() if ours not in allow_missing for part in several}
    missing = sorted(needed - set(stored))
    if missing:
        raise ValueError(f"'{source.path}' lacks {len(missing)} tensors: {_first(missing)}")
    extra = source.names - set(stored.values())
    unknown = sorted(name for name in extra if not name.startswith(HEADS) and not name.endswith(ignored))
    if unknown:
        raise ValueError(f"'{source.path}' has {len(unknown)} tensors that this architecture lacks: {_first(unknown)}")


def _first(names: list[str]) -> str:
    return ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")


def _read(handle: Any, part: _Part, ours: Box) -> Tensor:
    """Read the box ``ours`` of our parameter, and nothing else."""
    value = handle[part.theirs(ours)]
    return (value.t() if part.transpose else value).reshape(box_shape(ours))


def init_random(config: ModelConfig, params: FlatParams, seed: int) -> None:
    """Draw a new model: matrices from N(0, init_std), norms that change nothing, biases 0.

    Each parameter has its own generator and is drawn whole, so that the model does not depend on how it is cut.
    """
    for name in params.names:
        _draw(config, params, name, seed)


def _draw(config: ModelConfig, params: FlatParams, name: str, seed: int) -> None:
    spec, box = params.spec(name), params.box(name)
    if len(spec.shape) < 2:
        neutral = 1.0 - config.norm_offset if name.endswith("norm.weight") else 0.0
        params.write(name, box, torch.full((), neutral))
        return
    generator = torch.Generator().manual_seed(stable_seed(seed, name))
    full = torch.empty(spec.shape).normal_(0.0, config.init_std, generator=generator)
    params.write(name, box, full[relative(box, whole(spec.shape))])


def save_hf(
    folder: Path | str,
    config: ModelConfig,
    read: Callable[[str], Tensor],
    tokenizer_folder: Path | str | None,
    max_shard_bytes: float = 5e9,
) -> None:
    """Write a folder that Hugging Face loads: weights, configuration and the tokenizer's files.

    ``read`` gives a whole parameter by our name and is called once for each, in the order of ``param_specs``. Files
    are written aside and the folder appears by renaming; one that was there before is replaced.
    """
    target = Path(folder)
    aside = target.with_name(f".{target.name}.new")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    dtype = _write_weights(aside, _assembled(config, read), max_shard_bytes)
    (aside / "config.json").write_text(json.dumps(config_json(config, dtype), indent=2) + "\n")
    if tokenizer_folder is not None:
        for pattern in TOKENIZER_FILES:
            for file in Path(tokenizer_folder).glob(pattern):
                shutil.copy2(file, aside / file.name)
    for file in aside.iterdir():
        _fsync(file)
    old = target.with_name(f".{target.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if target.exists():
        target.rename(old)
    aside.rename(target)
    shutil.rmtree(old, ignore_errors=True)


def _fsync(file: Path) -> None:
    with file.open("rb") as handle:
        os.fsync(handle.fileno())


def config_json(config: ModelConfig, dtype: torch.dtype) -> dict[str, Any]:
    """Return what ``config.json`` says of a model whose weights have this type."""
    family = FAMILIES[config.family]
    kind = str(dtype).removeprefix("torch.")
    fields = {
        "architectures": [family.architecture(config)],
        "model_type": family.name,
        "dtype": kind,
        "torch_dtype": kind,  # transformers before 4.56
        **family.config_to_hf(config),
    }
    if config.head == "scalar":
        fields |= {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}, "problem_type": "regression"}
    return fields


def _assembled(config: ModelConfig, read: Callable[[str], Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield whole Hugging Face tensors; those with several parts when the last part has come."""
    specs = param_specs(config)
    parts = parts_of_parameters({spec.name: spec for spec in specs}, FAMILIES[config.family].hf_tensors(config))
    shapes = hf_shapes(parts)
    waiting: dict[str, Tensor] = {}
    left = {name: math.prod(shape) for name, shape in shapes.items()}
    for spec in specs:
        ours = read(spec.name).detach().cpu()
        for part in parts[spec.name]:
            value = ours[tuple(slice(*span) for span in part.at)]
            if part.name not in waiting:
                waiting[part.name] = torch.empty(shapes[part.name], dtype=value.dtype)
            place = waiting[part.name][part.theirs(part.at)]
            place.copy_(value.t() if part.transpose else value.reshape(place.shape))
            left[part.name] -= value.numel()
            if not left[part.name]:
                yield part.name, waiting.pop(part.name)
    assert not waiting, f"parts are missing of {sorted(waiting)}"


def _write_weights(folder: Path, tensors: Iterator[tuple[str, Tensor]], max_shard_bytes: float) -> torch.dtype:
    """Write one file, or several and an index; at most one file's tensors are in memory."""
    shards: list[list[str]] = []
    batch: dict[str, Tensor] = {}
    size = total = 0
    dtype = torch.float32

    def flush() -> None:
        save_file(batch, folder / f"shard-{len(shards)}", metadata={"format": "pt"})
        shards.append(list(batch))
        batch.clear()

    for name, tensor in tensors:
        if batch and size + tensor.nbytes > max_shard_bytes:
            flush()
            size = 0
        batch[name] = tensor
        size += tensor.nbytes
        total += tensor.nbytes
        dtype = tensor.dtype
    flush()
    if len(shards) == 1:
        (folder / "shard-0").rename(folder / SINGLE)
        return dtype
    files = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    for i, file in enumerate(files):
        (folder / f"shard-{i}").rename(folder / file)
    weight_map = {name: file for names, file in zip(shards, files, strict=True) for name in names}
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
    return dtype
