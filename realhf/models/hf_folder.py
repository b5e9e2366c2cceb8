"""Hugging Face folders: read the slices that a shard needs, write whole models, initialise new ones."""

import json
import math
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from realhf.api.model_config import ModelConfig
from realhf.api.param_box import Box, box_shape, intersect, relative, whole
from realhf.arch.families import FAMILIES
from realhf.arch.families.common.base import HfTensor
from realhf.arch.hf_config import TEXT_PART
from realhf.arch.param_specs import param_specs
from realhf.base.seeds import stable_seed
from realhf.models.flat_params import FlatParams
from realhf.models.stored_formats import SplitExperts, stored_format

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
DECAYS = 0.01, 16.0
"""The range of the rates of decay of a new model's gated delta rule."""
MAX_FILE_BYTES = 5e9
HEADS = {"lm": ("lm_head.", "embed_out."), "scalar": ("score.",), "": ("classifier.", "v_head.")}


class _SafetensorsFolder(ExitStack):
    """The tensors of a folder by name, from one or several files, which are open until the context ends."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        self._files: dict[str, Any] = {}
        self._file_of = self._index()
        self.names = set(self._file_of)

    def _index(self) -> dict[str, str]:
        if (self.path / INDEX).is_file():
            return json.loads((self.path / INDEX).read_text())["weight_map"]
        if (self.path / SINGLE).is_file():
            with safe_open(self.path / SINGLE, framework="pt") as file:
                return dict.fromkeys(file.keys(), SINGLE)
        if list(self.path.glob("*.bin")):
            raise ValueError(f"'{self.path}' has pickled .bin weights, which are not supported: convert to safetensors")
        raise ValueError(f"'{self.path}' has no {SINGLE} and no {INDEX}")

    def handle(self, name: str) -> Any:
        """Return a lazy handle on a stored tensor, which reads when indexed."""
        file = self._file_of[name]
        if file not in self._files:
            if not (self.path / file).is_file():
                raise ValueError(f"'{self.path}' lacks '{file}', which its index lists")
            self._files[file] = self.enter_context(safe_open(self.path / file, framework="pt"))
        return self._files[file].get_slice(name)


class _StoredTensors:
    """The tensors of an open folder, dequantised if its ``config.json`` says that they are quantized."""

    def __init__(self, files: _SafetensorsFolder, splits_experts: bool) -> None:
        self.path, file = files.path, files.path / "config.json"
        config = json.loads(file.read_text()) if file.is_file() else {}
        text_part = config.get(TEXT_PART)
        options = config.get("quantization_config") or (text_part or {}).get("quantization_config")
        self._format = stored_format(files, options)
        if splits_experts:
            self._format = SplitExperts(self._format)
        stored = self._format.names
        self._stored = {name: name for name in stored} if text_part is None else _text_names(stored)
        self.names = set(self._stored)

    def read(self, name: str, shape: tuple[int, ...], box: tuple[slice, ...]) -> Tensor:
        """Return a box of a tensor, whose spans may have steps; ValueError for another shape or type."""
        stored = self._stored[name]
        if (found := self._format.shape(stored)) != shape:
            raise ValueError(f"'{self.path}': tensor '{stored}' has shape {list(found)}, "
                             f"expected {list(shape)} by config.json")  # fmt: skip
        try:
            value = self._format.read(stored, tuple(slice(span.start, span.stop) for span in box))
        except ValueError as error:
            raise ValueError(f"'{self.path}': {error}") from error
        return value[tuple(slice(None, None, span.step) for span in box)]


def _text_names(names: set[str]) -> dict[str, str]:
    """Return the stored names in a multimodal folder by those of the text model; other tensors are left out.

    Before transformers 5 the text model is stored as a whole, since then below the base model of all parts.
    """
    found = {name: name for name in names if name.startswith("lm_head.")}
    found |= {name.removeprefix("language_model."): name for name in names if name.startswith("language_model.")}
    inside = "model.language_model."
    return found | {f"model.{name.removeprefix(inside)}": name for name in names if name.startswith(inside)}


@dataclass(frozen=True)
class StoredSlice:
    """Where a slice of one of our parameters is stored: its box ``at`` is ``box`` of the tensor ``name``.

    ``dims``, ``step`` and ``step_dim`` are those of ``HfTensor``.
    """

    name: str
    at: Box
    box: Box
    dims: tuple[int, ...]
    step: int = 1
    step_dim: int = 0

    @staticmethod
    def of(tensor: HfTensor, shape: tuple[int, ...]) -> "StoredSlice":
        n_dims = len(shape) if tensor.box is None else len(tensor.box)
        dims = tensor.dims or tuple(range(len(shape) - n_dims, len(shape)))
        box = tensor.box or tuple((0, shape[dim]) for dim in dims)
        return StoredSlice(tensor.name, tensor.at or whole(shape), box, dims, tensor.step, tensor.step_dim)

    def stored(self, ours: Box) -> tuple[slice, ...]:
        """Translate a box inside ``at`` to the coordinates of the stored tensor."""
        spans = []
        for number, (dim, (base, _)) in enumerate(zip(self.dims, self.box, strict=True)):
            start, stop = (edge - self.at[dim][0] for edge in ours[dim])
            step = self.step if number == self.step_dim else 1
            spans.append(slice(base + start * step, base + (stop - 1) * step + 1, step))
        return tuple(spans)

    @property
    def order(self) -> tuple[int, ...]:
        """Our dimensions, first those that the stored tensor lacks, then in the order of its own."""
        return (*(dim for dim in range(len(self.at)) if dim not in self.dims), *self.dims)

    @property
    def is_permuted(self) -> bool:
        return list(self.order) != sorted(self.order)

    def from_stored(self, value: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Return a stored slice as ours, of this ``shape``."""
        return value.permute(sorted(range(value.dim()), key=lambda n: self.dims[n])).reshape(shape)

    def to_stored(self, value: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Return a slice of ours as it is stored, of this ``shape``."""
        return value.permute(self.order).reshape(shape)


StoredSlices = dict[str, tuple[StoredSlice, ...]]


def stored_slices(config: ModelConfig) -> StoredSlices:
    shapes = {spec.name: spec.shape for spec in param_specs(config)}
    tensors = FAMILIES[config.family].hf_tensors(config)
    return {name: tuple(StoredSlice.of(t, shapes[name]) for t in several) for name, several in tensors.items()}


def hf_head(config: ModelConfig) -> str:
    """Return the stored name of a model's own head."""
    return FAMILIES[config.family].hf_tensors(config)["head.weight"][0].name


def hf_shapes(stored: StoredSlices) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    for part in (part for several in stored.values() for part in several):
        stops = tuple(stop for _, stop in part.box)
        shapes[part.name] = tuple(map(max, shapes.get(part.name, stops), stops))
    return shapes


def load_hf(
    folder: Path | str, config: ModelConfig, params: FlatParams, seed: int, allow_missing: frozenset[str] = frozenset()
) -> None:
    """Fill ``params`` from a folder of safetensors, reading only the slices that the shard holds.

    Parameters in ``allow_missing`` that the folder lacks (a new scalar head) are initialised from ``seed``. Raises
    ValueError for other missing tensors, wrong shapes and types, and tensors that would be ignored: only heads of other
    tasks, copies of a tied embedding, and buffers may be.
    """
    family, slices = FAMILIES[config.family], stored_slices(config)
    shapes = hf_shapes(slices)
    tied = config.tied_embedding and config.head == "lm"
    copy = hf_head(replace(config, tied_embedding=False)) if tied else None
    with _SafetensorsFolder(Path(folder)) as files:
        source = _StoredTensors(files, any(".experts.0.gate_proj." in name for name in shapes))
        names = _stored_names(source, set(shapes), family.base_prefix)
        needed = {part.name for ours, several in slices.items() if ours not in allow_missing for part in several}
        heads = tuple(prefix for head, prefixes in HEADS.items() if head != config.head for prefix in prefixes)
        extra = re.compile(rf"mtp\.|(?:{re.escape(family.base_prefix)})?layers\.(\d+)\.")

        def is_ignorable(name: str) -> bool:
            found = extra.match(name) if family.extra_layers else None
            is_extra = found is not None and (found[1] is None or int(found[1]) >= config.n_layers)
            return is_extra or name == copy or name.startswith(heads) or name.endswith(family.ignored)

        _check_names(source, names, needed, is_ignorable)
        for name in params.names:
            if name not in slices or slices[name][0].name not in names:
                _init_parameter(config, params, name, seed)
                continue
            for part in slices[name]:
                if (ours := intersect(part.at, params.box(name))) is None:
                    continue
                box, shape = part.stored(ours), shapes[part.name]
                value = source.read(names[part.name], shape, box)
                if name == "embed.weight" and copy in source.names:
                    _check_tied(source, names[part.name], value, copy, source.read(copy, shape, box))
                params.write(name, ours, part.from_stored(value, box_shape(ours)))


def _stored_names(source: _StoredTensors, wanted: set[str], prefix: str) -> dict[str, str]:
    """Map each wanted name to the folder's own; a bare base model is saved without the prefix."""
    spellings = {name: (name, name.removeprefix(prefix)) for name in wanted}
    return {name: s for name, both in spellings.items() for s in both[::-1] if s in source.names}


def _check_tied(source: _StoredTensors, name: str, value: Tensor, copy: str, copied: Tensor) -> None:
    if not torch.equal(value, copied):
        raise ValueError(f"'{source.path}': tensors '{name}' and '{copy}' differ, but config.json ties them: "
                         "set tie_word_embeddings to false, or remove the wrong one")  # fmt: skip


def _check_names(
    source: _StoredTensors, names: dict[str, str], needed: set[str], is_ignorable: Callable[[str], bool]
) -> None:
    if missing := sorted(needed - set(names)):
        raise ValueError(f"'{source.path}' lacks {len(missing)} tensors: {_first(missing)}")
    extra = source.names - set(names.values())
    if unknown := sorted(name for name in extra if not is_ignorable(name)):
        raise ValueError(f"'{source.path}' has {len(unknown)} tensors that this architecture lacks: {_first(unknown)}")


def _first(names: list[str]) -> str:
    return ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")


def init_random(config: ModelConfig, params: FlatParams, seed: int) -> None:
    """Initialise a new model: matrices from N(0, init_std), norms to the identity, biases and adapters to 0.

    Each parameter is drawn in full from its own generator, so the model does not depend on its sharding.
    """
    for name in params.names:
        _init_parameter(config, params, name, seed)


def _init_parameter(config: ModelConfig, params: FlatParams, name: str, seed: int) -> None:
    spec, box = params.spec(name), params.box(name)
    if not spec.is_matrix:
        params.write(name, box, _initial_vector(config, name, spec.shape, seed)[relative(box, whole(spec.shape))])
        return
    if name.endswith(".lora_b"):
        return  # zero: the model starts as its base
    generator, full = torch.Generator().manual_seed(stable_seed(seed, name)), torch.empty(spec.shape)
    if name.endswith(".lora_a"):
        full.uniform_(-(bound := spec.shape[-1] ** -0.5), bound, generator=generator)  # as in PEFT
    else:
        full.normal_(0.0, config.init_std, generator=generator)
    params.write(name, box, full[relative(box, whole(spec.shape))])


def _initial_vector(config: ModelConfig, name: str, shape: tuple[int, ...], seed: int) -> Tensor:
    """Return identity norms, zero biases, and decays of the gated delta rule as transformers initialises them."""
    if name.endswith("delta.a_log"):
        generator = torch.Generator().manual_seed(stable_seed(seed, name))
        return torch.empty(shape).uniform_(*DECAYS, generator=generator).log_()
    ones = 1.0 if name.endswith(("delta.norm", "delta.dt_bias")) else 0.0
    return torch.full(shape, 1.0 - config.norm_offset if name.endswith("norm.weight") else ones)


def save_hf(
    folder: Path | str, config: ModelConfig, read: Callable[[str], Tensor], tokenizer_folder: Path | str | None
) -> None:
    """Write a Hugging Face folder: weights, configuration and the tokenizer's files.

    ``read`` returns a whole parameter by our name; it is called once for each, in the order of ``param_specs``. The
    folder is written under a temporary name and then renamed; an existing one is replaced.
    """
    with replaced_folder(folder, tokenizer_folder) as new:
        dtype = _write_weights(new, _whole_tensors(config, read))
        (new / "config.json").write_text(json.dumps(config_json(config, dtype), indent=2) + "\n")


@contextmanager
def replaced_folder(folder: Path | str, tokenizer_folder: Path | str | None) -> Iterator[Path]:
    """Give an empty folder to write to, add the tokenizer's files, and let it replace ``folder``."""
    target = Path(folder)
    new, old = (target.with_name(f".{target.name}.{suffix}") for suffix in ("new", "old"))
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir(parents=True)
    yield new
    if tokenizer_folder is not None:
        for pattern in TOKENIZER_FILES:
            for file in Path(tokenizer_folder).glob(pattern):
                shutil.copy2(file, new / file.name)
    for file in new.iterdir():
        with file.open("rb") as handle:
            os.fsync(handle.fileno())
    shutil.rmtree(old, ignore_errors=True)
    if target.exists():
        target.rename(old)
    new.rename(target)
    shutil.rmtree(old, ignore_errors=True)


def config_json(config: ModelConfig, dtype: torch.dtype) -> dict[str, Any]:
    family = FAMILIES[config.family]
    dtype_name = str(dtype).removeprefix("torch.")
    fields = {
        "architectures": [family.architecture(config)],
        "model_type": family.name,
        "dtype": dtype_name,
        "torch_dtype": dtype_name,  # transformers before 4.56
        **family.config_to_hf(config),
    }
    if config.head == "scalar":
        fields |= {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}, "problem_type": "regression"}
    return fields


def _whole_tensors(config: ModelConfig, read: Callable[[str], Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield whole Hugging Face tensors; one with several slices once the last slice is read."""
    slices = stored_slices(config)
    shapes = hf_shapes(slices)
    partial: dict[str, Tensor] = {}
    missing = {name: math.prod(shape) for name, shape in shapes.items()}
    for spec in param_specs(config):
        ours = read(spec.name).detach().cpu()
        for part in slices[spec.name]:
            value = ours[tuple(slice(*span) for span in part.at)]
            if part.name not in partial:
                partial[part.name] = torch.empty(shapes[part.name], dtype=value.dtype)
            target = partial[part.name][part.stored(part.at)]
            target.copy_(part.to_stored(value, target.shape))
            missing[part.name] -= value.numel()
            if not missing[part.name]:
                yield part.name, partial.pop(part.name)
    assert not partial, f"slices are missing of {sorted(partial)}"


def _write_weights(folder: Path, tensors: Iterator[tuple[str, Tensor]]) -> torch.dtype:
    """Write one file, or several and an index; only one file's tensors are in memory at a time."""
    shards: list[list[str]] = []
    batch: dict[str, Tensor] = {}
    total = 0
    dtype = torch.float32

    def flush() -> None:
        save_file(batch, folder / f"shard-{len(shards)}", metadata={"format": "pt"})
        shards.append(list(batch))
        batch.clear()

    for name, tensor in tensors:
        if batch and sum(t.nbytes for t in batch.values()) + tensor.nbytes > MAX_FILE_BYTES:
            flush()
        batch[name] = tensor
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
