"""Plans parameter reallocation between any two layouts: which worker sends which box of which parameter to whom."""

from collections import Counter
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import product

from realhf.api.layout import Layout, ParallelStrategy
from realhf.api.param_box import Box, Cuts, ParamSpec, box_numel, intersect, numbered_box

Stages = Callable[[int, int], Sequence[Container[int]]]
"""Maps a number of pipeline stages, and of chunks in each, to the layers of each stage."""
ParamBox = tuple[str, Box]  # a parameter name and a box in global coordinates
ShardCoords = tuple[tuple[int, int], ...]
"""(stage, number of the shard in it) of the shards with the same box, in each replica of the weights."""
TPSplit = tuple[tuple[int, ...], int | None, int, bool]
"""(shape, tp_dim, tp_units, is_expert), which determine the sharding."""
ParamKinds = tuple[tuple[tuple[int, int | None], tuple[tuple[TPSplit, int], ...]], ...]
"""For each pair (layer, shared_layer), the number of parameters per sharding."""
TransferSizes = dict[tuple[ShardCoords, ShardCoords], tuple[int, int]]  # (elements, boxes) by (source, destination)


@dataclass(frozen=True)
class BoxCopy:
    """A copy of a box, in global coordinates, from worker ``src`` to worker ``dst``; it is local if these are equal."""

    name: str
    box: Box
    src: int
    dst: int


@dataclass(frozen=True)
class Route:
    """Boxes that worker ``src`` sends to each of ``dsts``; it is a local copy if ``dsts`` is ``(src,)``."""

    src: int
    dsts: tuple[int, ...]
    parts: tuple[ParamBox, ...]

    @cached_property
    def numel(self) -> int:
        """Number of elements per receiver."""
        return sum(box_numel(box) for _, box in self.parts)

    def copies(self) -> Iterator[BoxCopy]:
        return (BoxCopy(name, box, self.src, dst) for name, box in self.parts for dst in self.dsts)


def route_copies(routes: Sequence[Route]) -> Iterator[BoxCopy]:
    """Yield every copy of every route; copies of the same box are adjacent."""
    return (copy for route in routes for copy in route.copies())


def shard_boxes(specs: Sequence[ParamSpec], stages: Stages, layout: Layout, rank: int) -> dict[str, Box]:
    """Return the boxes of a worker's shard by parameter name."""
    at, strategy = layout.coord(rank), layout.strategy
    layers, number = stages(strategy.pp, strategy.vpp)[at.pp], strategy.shard_number(at.dp, at.tp)
    boxes = {s.name: numbered_box(s, strategy.cuts, number) for s in specs if s.is_in(layers)}
    return {name: box for name, box in boxes.items() if box is not None}


def plan_realloc(
    specs: Sequence[ParamSpec], stages: Stages, src: Layout, dst: Layout, node_size: int = 1 << 30
) -> tuple[Route, ...]:
    """Return the routes that fill layout ``dst`` from layout ``src``, without redundant transfers.

    The sender of a box is the worker itself if it holds the box, else a worker on the same node, else any. Several
    holders divide the boxes evenly; a box is sent to all receivers on a node at once, so that shared memory is written
    once. Data-parallel replicas hold and need the same boxes, so planning time grows with the number of parameters and
    the number of workers, but not with their product.
    """
    src_layers, dst_layers = (stages(some.strategy.pp, some.strategy.vpp) for some in (src, dst))
    groups: dict[tuple[ShardCoords, ShardCoords], list[ParamBox]] = {}
    for spec in specs:
        held_by = [p for p, layers in enumerate(src_layers) if spec.is_in(layers)]
        needed_by = [p for p, layers in enumerate(dst_layers) if spec.is_in(layers)]
        boxes = _intersections(*_split(spec), src.strategy.cuts, dst.strategy.cuts)
        for holding, needing, box in boxes:
            shards = tuple(product(held_by, holding)), tuple(product(needed_by, needing))
            groups.setdefault(shards, []).append((spec.name, box))
    routes: list[Route] = []
    for (held, needed), parts in groups.items():
        routes += _routes(tuple(parts), coord_ranks(src, held), coord_ranks(dst, needed), node_size)
    return tuple(routes)


def coord_ranks(layout: Layout, shards: ShardCoords) -> list[int]:
    """Return the workers that hold these shards in all replicas. Optimized, since a search calls it very often."""
    ranks, (n, size) = layout.mesh.ranks, (layout.strategy.n_replicas, layout.strategy.n_shards)
    return [ranks[(p * n + replica) * size + number] for replica in range(n) for p, number in shards]


def count_param_kinds(specs: Sequence[ParamSpec]) -> ParamKinds:
    """Count the parameters with equal sharding, by layers."""
    counts: dict[tuple[int, int | None], Counter[TPSplit]] = {}
    for spec in specs:
        counts.setdefault((spec.layer, spec.shared_layer), Counter())[_split(spec)] += 1
    return tuple((layers, tuple(of_layers.items())) for layers, of_layers in counts.items())


def transfer_sizes(kinds: ParamKinds, stages: Stages, src: ParallelStrategy, dst: ParallelStrategy) -> TransferSizes:
    """Return the total (elements, boxes) that ``plan_realloc`` moves, by source and destination shards."""
    both = [stages(some.pp, some.vpp) for some in (src, dst)]  # equal layers in the same stages are computed once
    n_equal: Counter[tuple[tuple[int, ...], tuple[int, ...], tuple[tuple[TPSplit, int], ...]]] = Counter()
    for layers, splits in kinds:
        held_by, needed_by = (tuple(p for p, own in enumerate(some) if any(at in own for at in layers))
                              for some in both)  # fmt: skip
        n_equal[held_by, needed_by, splits] += 1
    sizes: TransferSizes = {}
    for (held_by, needed_by, splits), n_layers in n_equal.items():
        for split, n in splits:
            for holding, needing, box in _intersections(*split, src.cuts, dst.cuts):
                shards = tuple(product(held_by, holding)), tuple(product(needed_by, needing))
                numel, n_parts = sizes.get(shards, (0, 0))
                sizes[shards] = (numel + n_layers * n * box_numel(box), n_parts + n_layers * n)
    return sizes


def _split(spec: ParamSpec) -> TPSplit:
    return spec.shape, spec.tp_dim, spec.tp_units, spec.is_expert


@lru_cache(maxsize=4096)
def _intersections(
    shape: tuple[int, ...], tp_dim: int | None, tp_units: int, is_expert: bool, src: Cuts, dst: Cuts
) -> tuple[tuple[tuple[int, ...], tuple[int, ...], Box], ...]:
    """Return (numbers of source shards, of destination shards, box) for all intersections of two shardings."""
    spec = ParamSpec("", shape, 0, tp_dim, tp_units, is_expert=is_expert)
    held: dict[Box, list[int]] = {}
    needed: dict[Box, list[int]] = {}
    for boxes, cuts in ((held, src), (needed, dst)):
        for number in range(cuts.n_shards):
            if (box := numbered_box(spec, cuts, number)) is not None:
                boxes.setdefault(box, []).append(number)
    return tuple(
        (tuple(holding), tuple(needing), part)
        for src_box, holding in held.items()
        for dst_box, needing in needed.items()
        if (part := intersect(src_box, dst_box)) is not None
    )


def _routes(parts: tuple[ParamBox, ...], holders: list[int], needers: list[int], node_size: int) -> list[Route]:
    satisfied, transfers = assign_senders(holders, needers, node_size)
    routes = [Route(rank, (rank,), parts) for rank in satisfied]
    chunks = {n: _chunks(parts, n) for n in {len(senders) for senders, _ in transfers}}
    for senders, receivers in transfers:
        pairs = zip(senders, chunks[len(senders)], strict=False)
        routes += [Route(src, tuple(receivers), chunk) for src, chunk in pairs]
    return routes


Senders = tuple[list[int], list[tuple[Sequence[int], list[int]]]]


def assign_senders(holders: Sequence[int], needers: Sequence[int], node_size: int) -> Senders:
    """Return the workers that need no transfer, and (senders of equal shares, receivers) for each node of others."""
    have = set(holders)
    missing: dict[int, list[int]] = {}
    for rank in needers:
        if rank not in have:
            missing.setdefault(rank // node_size, []).append(rank)
    if not missing:
        return list(needers), []
    near: dict[int, list[int]] = {}
    for rank in holders:
        near.setdefault(rank // node_size, []).append(rank)
    far = {node: i for i, node in enumerate(node for node in missing if node not in near)}
    return [rank for rank in needers if rank in have], [
        (near.get(node) or _share(holders, far[node], len(far)), receivers) for node, receivers in missing.items()
    ]


def _share(holders: Sequence[int], index: int, n_shares: int) -> Sequence[int]:
    """Return the holders that send to the ``index``-th of ``n_shares`` nodes: an equal share, at least one."""
    start = index * len(holders) // n_shares
    return holders[start : max(start + 1, (index + 1) * len(holders) // n_shares)]


def _chunks(parts: tuple[ParamBox, ...], n: int) -> list[tuple[ParamBox, ...]]:
    """Split boxes into at most ``n`` chunks of equal size, up to one row of a matrix."""
    total = sum(box_numel(box) for _, box in parts)
    chunks: list[list[ParamBox]] = [[]]
    done = 0
    for name, box in parts:
        rest, wide = box, box_numel(box[1:])
        while len(chunks) < n and done + box_numel(rest) > (goal := len(chunks) * total // n):
            (start, stop), *others = rest
            middle = min(stop, start + (-(-(goal - done) // wide) if others else stop))  # vectors are not split
            if start < middle:
                chunks[-1].append((name, ((start, middle), *others)))
                done += (middle - start) * wide
            chunks.append([])
            rest = ((middle, stop), *others)
        if box_numel(rest):
            chunks[-1].append((name, rest))
            done += box_numel(rest)
    return [tuple(chunk) for chunk in chunks if chunk]
