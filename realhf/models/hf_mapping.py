"""Where the tensors of a Hugging Face model lie in the memory of its shards: who maps it needs no copy."""

from collections.abc import Iterable
from dataclasses import dataclass

from realhf.api.model_config import ModelConfig
from realhf.api.param_box import Box, intersect
from realhf.arch.families import FAMILIES
from realhf.arch.param_specs import param_specs
from realhf.models.flat_params import FlatParams
from realhf.models.hf_folder import hf_shapes, parts_of_parameters


@dataclass(frozen=True)
class Place:
    """A part of a tensor: ``box`` of it is what lies, with ``shape``, from element ``start`` of a shard's memory on."""

    shard: int
    start: int
    shape: tuple[int, ...]
    box: Box
    transpose: bool


@dataclass(frozen=True)
class HfSlot:
    """One tensor as Hugging Face names it, the layer that it belongs to, and where its parts are."""

    name: str
    layer: int
    shape: tuple[int, ...]
    places: tuple[Place, ...]


def hf_mapping(config: ModelConfig, shards: Iterable[FlatParams]) -> list[HfSlot]:
    """Return every tensor of a model with its places in the shards that together hold it; these need no memory.

    What several shards hold is taken from the first.
    """
    specs = {spec.name: spec for spec in param_specs(config)}
    parts = parts_of_parameters(specs, FAMILIES[config.family].hf_tensors(config))
    shapes = hf_shapes(parts)
    layers = {part.name: specs[ours].layer for ours, several in parts.items() for part in several}
    found: dict[str, dict[Box, Place]] = {name: {} for name in shapes}
    for number, shard in enumerate(shards):
        for name in shard.names:
            for part in parts[name]:
                if (ours := intersect(part.at, shard.box(name))) is None:
                    continue
                value = shard.read(name, ours)
                assert value.is_contiguous(), f"{part.name} is no run of {name}"
                box = tuple((span.start, span.stop) for span in part.theirs(ours))
                place = Place(number, int(value.storage_offset()), tuple(value.shape), box, part.transpose)
                found[part.name].setdefault(box, place)
    return [HfSlot(name, layers[name], shapes[name], tuple(places.values())) for name, places in found.items()]
