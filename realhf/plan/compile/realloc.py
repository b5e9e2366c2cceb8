"""Which box of which parameter must move from which worker to which, from any layout to any other."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from realhf.api.layout import Layout, ParallelStrategy
from realhf.api.param_box import Box, ParamSpec, box_numel, intersect, shard_box

Stages = Callable[[int], Sequence[range]]
"""From a number of pipeline stages to the layers of each."""

ParamBox = tuple[str, Box]
"""A box, in global coordinates, of a named parameter."""

ShardCoords = tuple[tuple[int, int], ...]
"""(stage, tensor rank) of all that hold the same box; every data-parallel rank has one."""

TPSplit = tuple[tuple[int, ...], int | None, int]
"""(shape, tp_dim, tp_units): what decides how a parameter is cut."""

ParamKinds = tuple[tuple[tuple[int, int | None], tuple[tuple[TPSplit, int], ...]], ...]
"""For each pair (layer, shared_layer) how many parameters are cut how."""

TransferSizes = dict[tuple[ShardCoords, ShardCoords], tuple[int, int]]
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
    parts: tuple[ParamBox, ...]

    @cached_property
    def numel(self) -> int:
        """Elements that each receiver gets."""
        return sum(box_numel(box) for _, box in self.parts)

    def copies(self) -> Iterator[BoxCopy]:
        return (BoxCopy(name, box, self.src, dst) for name, box in self.parts for dst in self.dsts)


def route_copies(routes: Sequence[Route]) -> Iterator[BoxCopy]:
    """Return every copy of every route, those of the same part one after the other."""
    return (copy for route in routes for copy in route.copies())


def shard_boxes(specs: Sequence[ParamSpec], stages: Stages, layout: Layout, rank: int) -> dict[str, Box]:
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
        routes += _routes(tuple(parts), coord_ranks(src, holding), coord_ranks(dst, needing), node_size)
    return tuple(routes)


def coord_ranks(layout: Layout, seats: ShardCoords) -> list[int]:
    """Return the workers in these seats of all replicas; a search asks for hundreds of thousands of them."""
    ranks, (dp, tp) = layout.mesh.ranks, (layout.strategy.dp, layout.strategy.tp)
    return [ranks[(p * dp + d) * tp + t] for d in range(dp) for p, t in seats]


def count_param_kinds(specs: Sequence[ParamSpec]) -> ParamKinds:
    """Count the parameters that are cut alike, by their layers."""
    found: dict[tuple[int, int | None], Counter[TPSplit]] = {}
    for spec in specs:
        found.setdefault((spec.layer, spec.shared_layer), Counter())[spec.shape, spec.tp_dim, spec.tp_units] += 1
    return tuple((layers, tuple(counts.items())) for layers, counts in found.items())


def transfer_sizes(kinds: ParamKinds, stages: Stages, src: ParallelStrategy, dst: ParallelStrategy) -> TransferSizes:
    """Return (elements, parts) by who holds and who needs them: what ``plan_realloc`` moves, without naming it.

    Layers that are alike and lie in the same stages are counted once.
    """
    both = stages(src.pp), stages(dst.pp)
    alike: Counter[tuple[tuple[int, ...], tuple[int, ...], tuple[tuple[TPSplit, int], ...]]] = Counter()
    for layers, cuts in kinds:
        held_by, needed_by = (tuple(p for p, own in enumerate(some) if any(at in own for at in layers))
                              for some in both)  # fmt: skip
        alike[held_by, needed_by, cuts] += 1
    found: TransferSizes = {}
    for (held_by, needed_by, cuts), n_layers in alike.items():
        for cut, n in cuts:
            for holding, needing, box in _common(*cut, src.tp, dst.tp):
                ends = (
                    tuple((p, t) for p in held_by for t in holding),
                    tuple((p, t) for p in needed_by for t in needing),
                )
                numel, n_parts = found.get(ends, (0, 0))
                found[ends] = (numel + n_layers * n * box_numel(box), n_parts + n_layers * n)
    return found


def _parts(
    specs: Sequence[ParamSpec], stages: Stages, src: Layout, dst: Layout
) -> dict[tuple[ShardCoords, ShardCoords], list[ParamBox]]:
    """Sort what must move by who holds and who needs it."""
    src_layers, dst_layers = stages(src.strategy.pp), stages(dst.strategy.pp)
    found: dict[tuple[ShardCoords, ShardCoords], list[ParamBox]] = {}
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


def _routes(parts: tuple[ParamBox, ...], holders: list[int], needers: list[int], node_size: int) -> list[Route]:
    """Choose the senders of parts that all ``holders`` hold and all ``needers`` need."""
    cuts: dict[int, list[tuple[ParamBox, ...]]] = {}
    routes = []
    kept, given = assign_senders(holders, needers, node_size)
    routes += [Route(rank, (rank,), parts) for rank in kept]
    for senders, receivers in given:
        n = len(senders)
        chunks = cuts[n] if n in cuts else cuts.setdefault(n, _chunks(parts, n))
        routes += [Route(src, tuple(receivers), chunk) for src, chunk in zip(senders, chunks, strict=False)]
    return routes


Deliveries = tuple[list[int], list[tuple[Sequence[int], list[int]]]]


def assign_senders(holders: Sequence[int], needers: Sequence[int], node_size: int) -> Deliveries:
    """Return who has what it needs, and (senders, receivers) for the others.

    Each sender has an equal share of what all the receivers, of one node, lack.
    """
    have = set(holders)
    lacking: dict[int, list[int]] = {}
    for rank in needers:
        if rank not in have:
            lacking.setdefault(rank // node_size, []).append(rank)
    if not lacking:
        return list(needers), []
    near: dict[int, list[int]] = {}
    for rank in holders:
        near.setdefault(rank // node_size, []).append(rank)
    far = {node: i for i, node in enumerate(node for node in lacking if node not in near)}
    return [rank for rank in needers if rank in have], [
        (near.get(node) or _share(holders, far[node], len(far)), receivers) for node, receivers in lacking.items()
    ]


def _share(holders: Sequence[int], index: int, n_shares: int) -> Sequence[int]:
    """Return the holders that serve the ``index``-th of ``n_shares`` nodes: an equal share, one at the least."""
    start = index * len(holders) // n_shares
    return holders[start : max(start + 1, (index + 1) * len(holders) // n_shares)]


def _chunks(parts: tuple[ParamBox, ...], n: int) -> list[tuple[ParamBox, ...]]:
    """Cut parts into at most ``n`` runs of equal size, but for a row of a matrix on either side of a cut."""
    total = sum(box_numel(box) for _, box in parts)
    chunks: list[list[ParamBox]] = [[]]
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
