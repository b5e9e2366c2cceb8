"""Which box of which parameter must move from which worker to which, from any layout to any other."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from realhf.api.layout import Layout, ParallelStrategy
from realhf.api.params import Box, ParamSpec, box_numel, intersect, shard_box

Stages = Callable[[int], Sequence[range]]
"""From a number of pipeline stages to the layers of each."""

Part = tuple[str, Box]
"""A box, in global coordinates, of a named parameter."""

Seats = tuple[tuple[int, int], ...]
"""(stage, tensor rank) of all that hold the same box; every data-parallel rank has one."""

Sizes = dict[tuple[Seats, Seats], tuple[int, int]]
"""(elements, parts) by who holds and who needs them."""


@dataclass(frozen=True)
class BoxCopy:
    """A box, in global coordinates, on its way from worker ``src`` to worker ``dst`` (equal: a local copy)."""

    name: str
    box: Box
    src: int
    dst: int


@dataclass(frozen=True)
class Route:
    """Parts that worker ``src`` sends to each of ``dsts`` alike; ``(src,)`` alone is a local copy."""

    src: int
    dsts: tuple[int, ...]
    parts: tuple[Part, ...]

    @cached_property
    def numel(self) -> int:
        """Elements that each receiver gets."""
        return sum(box_numel(box) for _, box in self.parts)

    def copies(self) -> Iterator[BoxCopy]:
        return (BoxCopy(name, box, self.src, dst) for name, box in self.parts for dst in self.dsts)


def copies_of(routes: Sequence[Route]) -> Iterator[BoxCopy]:
    """Return every copy of every route, those of the same part one after the other."""
    return (copy for route in routes for copy in route.copies())


def shard_of(specs: Sequence[ParamSpec], stages: Stages, layout: Layout, rank: int) -> dict[str, Box]:
    """Return the boxes that a worker holds in a layout."""
    at, strategy = layout.coord(rank), layout.strategy
    layers = stages(strategy.pp)[at.pp]
    return {s.name: shard_box(s, strategy.tp, at.tp) for s in specs if s.is_in(layers)}


def plan_realloc(
    specs: Sequence[ParamSpec], stages: Stages, src: Layout, dst: Layout, node_size: int = 1 << 30
) -> tuple[Route, ...]:
    """Return the routes that fill layout ``dst`` from layout ``src``; each destination receives what it lacks once.

    The sender of a part is the worker itself where it holds it, else workers of its node, else any. Where several hold
    it they share the work: a part goes from one of them to all receivers of a node at once, so that memory they share
    is written once. Workers that differ in their data-parallel rank alone hold and need the same, which is why the time
    to plan grows with parameters and with workers, but not with their product.
    """
    routes: list[Route] = []
    for (holding, needing), parts in _parts(specs, stages, src, dst).items():
        routes += _routes(tuple(parts), seated(src, holding), seated(dst, needing), node_size)
    return tuple(routes)


def seated(layout: Layout, seats: Seats) -> list[int]:
    """Return the workers in these seats of all replicas; a search asks for hundreds of thousands of them."""
    ranks, (dp, tp) = layout.mesh.ranks, (layout.strategy.dp, layout.strategy.tp)
    return [ranks[(p * dp + d) * tp + t] for d in range(dp) for p, t in seats]


def sizes(specs: Sequence[ParamSpec], stages: Stages, src: ParallelStrategy, dst: ParallelStrategy) -> Sizes:
    """Return (elements, parts) by who holds and who needs them: what ``plan_realloc`` moves, without naming it.

    Layers that are alike and lie in the same stages are counted once.
    """
    src_layers, dst_layers = stages(src.pp), stages(dst.pp)
    kinds: Counter[tuple] = Counter()
    stages_of: dict[tuple[int, int | None], tuple[tuple[int, ...], ...]] = {}  # of a layer's few specs alike
    for spec in specs:
        place = spec.layer, spec.shared_layer
        if place not in stages_of:
            stages_of[place] = tuple(
                tuple(p for p, layers in enumerate(some) if spec.is_in(layers)) for some in (src_layers, dst_layers)
            )
        kinds[(*stages_of[place], spec.shape, spec.tp_dim, spec.tp_units)] += 1
    found: Sizes = {}
    for (held_by, needed_by, *cut), count in kinds.items():
        for holding, needing, box in _common(*cut, src.tp, dst.tp):
            seats = tuple((p, t) for p in held_by for t in holding), tuple((p, t) for p in needed_by for t in needing)
            numel, n_parts = found.get(seats, (0, 0))
            found[seats] = (numel + count * box_numel(box), n_parts + count)
    return found


def _parts(
    specs: Sequence[ParamSpec], stages: Stages, src: Layout, dst: Layout
) -> dict[tuple[Seats, Seats], list[Part]]:
    """Sort what must move by who holds and who needs it."""
    src_layers, dst_layers = stages(src.strategy.pp), stages(dst.strategy.pp)
    found: dict[tuple[Seats, Seats], list[Part]] = {}
    for spec in specs:
        held_by = [p for p, layers in enumerate(src_layers) if spec.is_in(layers)]
        needed_by = [p for p, layers in enumerate(dst_layers) if spec.is_in(layers)]
        cut = _common(spec.shape, spec.tp_dim, spec.tp_units, src.strategy.tp, dst.strategy.tp)
        for holding, needing, box in cut:
            seats = tuple((p, t) for p in held_by for t in holding), tuple((p, t) for p in needed_by for t in needing)
            found.setdefault(seats, []).append((spec.name, box))
    return found


@lru_cache(maxsize=4096)
def _common(
    shape: tuple[int, ...], tp_dim: int | None, tp_units: int, src_tp: int, dst_tp: int
) -> tuple[tuple[tuple[int, ...], tuple[int, ...], Box], ...]:
    """Return (tensor ranks that hold it, tensor ranks that need it, box) for all common parts of two cuts."""
    spec = ParamSpec("", shape, 0, tp_dim, tp_units)
    held: dict[Box, list[int]] = {}
    needed: dict[Box, list[int]] = {}
    for boxes, tp in ((held, src_tp), (needed, dst_tp)):
        for t in range(tp):
            boxes.setdefault(shard_box(spec, tp, t), []).append(t)
    return tuple(
        (tuple(holding), tuple(needing), part)
        for mine, holding in held.items()
        for yours, needing in needed.items()
        if (part := intersect(mine, yours)) is not None
    )


def _routes(parts: tuple[Part, ...], holders: list[int], needers: list[int], node_size: int) -> list[Route]:
    """Choose the senders of parts that all ``holders`` hold and all ``needers`` need."""
    cuts: dict[int, list[tuple[Part, ...]]] = {}
    routes = []
    for src, dsts, index, n in share_out(holders, needers, node_size):
        chunks = cuts[n] if n in cuts else cuts.setdefault(n, _chunks(parts, n))
        if index < len(chunks):
            routes.append(Route(src, dsts, chunks[index]))
    return routes


def share_out(holders: list[int], needers: list[int], node_size: int) -> list[tuple[int, tuple[int, ...], int, int]]:
    """Return (sender, receivers, index, n): the sender gives chunk ``index`` of ``n`` equal ones to the receivers."""
    have = set(holders)
    near: dict[int, list[int]] = {}
    for rank in holders:
        near.setdefault(rank // node_size, []).append(rank)
    found: list[tuple[int, tuple[int, ...], int, int]] = [(rank, (rank,), 0, 1) for rank in needers if rank in have]
    lacking: dict[int, list[int]] = {}
    for rank in needers:
        if rank not in have:
            lacking.setdefault(rank // node_size, []).append(rank)
    far = {node: i for i, node in enumerate(node for node in lacking if node not in near)}
    for node, receivers in lacking.items():
        senders = near.get(node) or _share(holders, far[node], len(far))
        found += [(src, tuple(receivers), i, len(senders)) for i, src in enumerate(senders)]
    return found


def _share(holders: list[int], index: int, n_shares: int) -> list[int]:
    """Return the holders that serve the ``index``-th of ``n_shares`` nodes: an equal share, one at the least."""
    start = index * len(holders) // n_shares
    return holders[start : max(start + 1, (index + 1) * len(holders) // n_shares)]


def _chunks(parts: tuple[Part, ...], n: int) -> list[tuple[Part, ...]]:
    """Cut parts into at most ``n`` runs of equal size, but for a row of a matrix on either side of a cut."""
    total = sum(box_numel(box) for _, box in parts)
    chunks: list[list[Part]] = [[]]
    done = 0
    for name, box in parts:
        rest, wide = box, box_numel(box[1:])
        while len(chunks) < n and done + box_numel(rest) > (goal := len(chunks) * total // n):
            (start, stop), *others = rest
            cut = min(stop, start + (-(-(goal - done) // wide) if others else stop))  # vectors are not worth a cut
            if start < cut:
                chunks[-1].append((name, ((start, cut), *others)))
                done += (cut - start) * wide
            chunks.append([])
            rest = ((cut, stop), *others)
        if box_numel(rest):
            chunks[-1].append((name, rest))
            done += box_numel(rest)
    return [tuple(chunk) for chunk in chunks if chunk]
