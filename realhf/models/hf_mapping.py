"""Where the tensors of a Hugging Face model are in the memory of its shards, for processes that map this memory."""

from collections.abc import Iterable
from dataclasses import dataclass

from realhf.api.model_config import ModelConfig
from realhf.api.param_box import Box, intersect
from realhf.arch.param_specs import param_specs
from realhf.models.flat_params import FlatParams
from realhf.models.hf_folder import hf_shapes, stored_slices


@dataclass(frozen=True)
class ShardSlice:
    """A slice of a tensor in a shard's memory: ``box`` is stored with ``shape`` from element ``start`` on."""

    shard: int
    start: int
    shape: tuple[int, ...]
    box: Box
    transpose: bool


@dataclass(frozen=True)
class MappedTensor:
    """A tensor by its Hugging Face name, the layer it belongs to, and the slices that make it up."""

    name: str
    layer: int
    shape: tuple[int, ...]
    slices: tuple[ShardSlice, ...]


def hf_mapping(config: ModelConfig, shards: Iterable[FlatParams]) -> list[MappedTensor]:
    """Return every tensor of a model with its slices in the shards that together hold it; these need no memory.

    A slice that several shards hold is taken from the first.
    """
    stored = stored_slices(config)
    shapes = hf_shapes(stored)
    layer_of = {spec.name: spec.layer for spec in param_specs(config)}
    layers = {part.name: layer_of[ours] for ours, several in stored.items() for part in several}
    slices: dict[str, dict[Box, ShardSlice]] = {name: {} for name in shapes}
    for number, shard in enumerate(shards):
        for name in shard.names:
            for part in stored[name]:
                if (ours := intersect(part.at, shard.box(name))) is None:
                    continue
                value = shard.read(name, ours)
                assert value.is_contiguous(), f"{part.name} is not contiguous in {name}"
                box = tuple((span.start, span.stop) for span in part.stored(ours))
                found = ShardSlice(number, int(value.storage_offset()), tuple(value.shape), box, part.transpose)
                slices[part.name].setdefault(box, found)
    return [MappedTensor(name, layers[name], shapes[name], tuple(some.values())) for name, some in slices.items()]
