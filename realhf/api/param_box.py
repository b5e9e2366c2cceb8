"""Parameters and their shards. A shard is a box: one half-open range per dimension, in GLOBAL coordinates."""

import math
from collections.abc import Container
from dataclasses import dataclass
from typing import NamedTuple

Box = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class ParamSpec:
    """One named parameter of a model.

    ``layer`` is 0 for the embedding, 1..L for blocks, L+1 for the head. ``tp_dim`` is the dimension that tensor
    parallelism shards (None: replicated), in ``tp_units`` indivisible units (heads, for attention). ``shared_layer``
    is a second layer that uses the parameter (a tied embedding is also the head); both stages hold it. With
    ``is_expert``, dimension 0 are the routed experts, which expert parallelism divides.
    """

    name: str
    shape: tuple[int, ...]
    layer: int
    tp_dim: int | None = None
    tp_units: int = 0
    shared_layer: int | None = None
    is_expert: bool = False

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def is_matrix(self) -> bool:
        """Whether it has weight decay and a random start: norms and biases, also those of experts, have neither."""
        return len(self.shape) > 1 and not self.name.rpartition(".")[2].startswith("b_")

    def is_in(self, layers: Container[int]) -> bool:
        """Return True if a stage with these layers holds the parameter."""
        return self.layer in layers or self.shared_layer in layers


def whole(shape: tuple[int, ...]) -> Box:
    return tuple((0, n) for n in shape)


def box_shape(box: Box) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in box)


def box_numel(box: Box) -> int:
    return math.prod(box_shape(box))


def intersect(a: Box, b: Box) -> Box | None:
    """Return the intersection of two boxes, or None if it is empty."""
    common = tuple((max(p, r), min(q, s)) for (p, q), (r, s) in zip(a, b, strict=True))
    return common if all(start < stop for start, stop in common) else None


def relative(box: Box, origin: Box) -> tuple[slice, ...]:
    """Return the slices that select ``box`` in an array that stores ``origin``."""
    return tuple(slice(start - base, stop - base) for (start, stop), (base, _) in zip(box, origin, strict=True))


def shard_box(spec: ParamSpec, tp: int, tp_rank: int) -> Box:
    """Return the box of ``spec`` on tensor-parallel rank ``tp_rank`` of ``tp``.

    The numbers of units per rank differ by at most one. With fewer units than ranks (few key/value heads), each unit
    is replicated on consecutive ranks.
    """
    if spec.tp_dim is None or tp == 1:
        return whole(spec.shape)
    units = spec.tp_units or spec.shape[spec.tp_dim]
    start = tp_rank * units // tp
    stop = max((tp_rank + 1) * units // tp, start + 1)
    width = spec.shape[spec.tp_dim] // units
    full = list(whole(spec.shape))
    full[spec.tp_dim] = (start * width, stop * width)
    return tuple(full)


def cut_box(box: Box, n: int, index: int) -> Box | None:
    """Return the ``index``-th of ``n`` nearly equal slices of a box; None if it is empty.

    The box is cut along its first dimension with at least ``n`` elements, else (a few experts) along its longest.
    """
    sizes = box_shape(box)
    dim = next((dim for dim, size in enumerate(sizes) if size >= n), sizes.index(max(sizes)))
    (start, _), size = box[dim], sizes[dim]
    span = start + index * size // n, start + (index + 1) * size // n
    return (*box[:dim], span, *box[dim + 1 :]) if span[0] < span[1] else None


class Cuts(NamedTuple):
    """How the weights of a stage are divided into ``n_shards``: by ``tp`` tensor-parallel ranks, experts by ``ep``."""

    tp: int
    n_shards: int
    ep: int = 1

    @property
    def expert_tp(self) -> int:
        """Number of ranks over which each expert is sharded."""
        return max(1, self.tp // self.ep)


def numbered_box(spec: ParamSpec, cuts: Cuts, number: int) -> Box | None:
    """Return the box of ``spec`` in shard ``number`` of a stage; None if it has nothing of it.

    Consecutive numbers are tensor-parallel ranks. With expert parallelism, ``cuts.expert_tp`` consecutive shards have
    the same experts. Else the shards of tensor-parallel ranks are cut into ``n_shards / tp`` shares by ZeRO-3.
    """
    tp, n_shards, ep = cuts
    if ep == 1:
        return cut_box(shard_box(spec, tp, number % tp), n_shards // tp, number // tp)
    if not spec.is_expert:
        return shard_box(spec, tp, number % tp)
    box, part, count = shard_box(spec, cuts.expert_tp, number % cuts.expert_tp), number // cuts.expert_tp, spec.shape[0]
    span = part * count // ep, (part + 1) * count // ep
    return (span, *box[1:]) if span[0] < span[1] else None


def largest_box(spec: ParamSpec, tp: int, ep: int = 1) -> Box:
    """Return the box of ``spec`` in the shard with most of it: of divided experts the last one, else the first."""
    if ep == 1 or not spec.is_expert:
        return shard_box(spec, tp, 0)
    cuts = Cuts(tp, max(tp, ep), ep)
    box = numbered_box(spec, cuts, cuts.n_shards - 1)
    assert box is not None, "the last shard has the most experts"
    return box
