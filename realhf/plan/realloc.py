"""Which box of which parameter must move from which worker to which, from any layout to any other."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from realhf.api.layout import Layout
from realhf.api.params import Box, ParamSpec, box_numel, intersect, shard_box

Stages = Callable[[int], Sequence[range]]
"""From a number of pipeline stages to the layers of each."""


@dataclass(frozen=True)
class BoxCopy:
    """A box, in global coordinates, on its way from worker ``src`` to worker ``dst`` (equal: a local copy)."""

    name: str
    box: Box
    src: int
    dst: int


def shard_of(specs: Sequence[ParamSpec], stages: Stages, layout: Layout, rank: int) -> dict[str, Box]:
    """Return the boxes that a worker holds in a layout."""
    at, strategy = layout.coord(rank), layout.strategy
    layers = stages(strategy.pp)[at.pp]
    return {s.name: shard_box(s, strategy.tp, at.tp) for s in specs if s.is_in(layers)}


def plan_realloc(
    specs: Sequence[ParamSpec], stages: Stages, src: Layout, dst: Layout, node_size: int = 1 << 30
) -> tuple[BoxCopy, ...]:
    """Return the copies that fill layout ``dst`` from layout ``src``; each destination receives what it lacks once.

    The sender of a box is the worker itself where it holds it, else a worker of its node, else any; among equals the
    one with the least elements to send so far.
    """
    held = {rank: shard_of(specs, stages, src, rank) for rank in src.mesh.ranks}
    load = dict.fromkeys(src.mesh.ranks, 0)
    copies = []
    for rank in dst.mesh.ranks:
        for name, need in shard_of(specs, stages, dst, rank).items():
            parts: dict[Box, list[int]] = {}
            for holder, boxes in held.items():
                if name in boxes and (part := intersect(boxes[name], need)) is not None:
                    parts.setdefault(part, []).append(holder)
            for part, holders in parts.items():  # shards are alike or disjoint, so these are too
                sender = min(holders, key=lambda h: (h != rank, h // node_size != rank // node_size, load[h], h))
                load[sender] += box_numel(part) * (sender != rank)
                copies.append(BoxCopy(name, part, sender, rank))
    return tuple(copies)
