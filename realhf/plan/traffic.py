"""What an exchange asks of its busiest worker, from the very routes and copies that will be carried out."""

from collections.abc import Iterable, Iterator
from functools import lru_cache

from realhf.api.batch import SCALAR_BYTES
from realhf.api.layout import Layout, ParallelStrategy
from realhf.api.messages import Call
from realhf.api.model import ModelConfig
from realhf.plan.realloc import Sizes, seated, share_out, sizes
from realhf.plan.specs import param_specs, stage_layers
from realhf.plan.speed import Traffic
from realhf.plan.transfer import plan_transfer

Copy = tuple[int, tuple[int, ...], int, int]
"""(sender, receivers, bytes, pieces)"""
SLOT_BYTES, N_SLOTS = 4 << 20, 4
"""A worker's ring, through which others of its host read what it sends (comm/shared_memory.py). Smaller slots cost more
waking up, a larger ring does not stay in the cache (measured, benchmarks/bench_realloc)."""
RING_BYTES = N_SLOTS * SLOT_BYTES
SENT, RECEIVED, FAR_SENT, FAR_RECEIVED, LOCAL, PIECES = range(6)


def traffic_of(copies: Iterable[Copy], node_size: int) -> Traffic:
    """Return the traffic of copies; what has several receivers on a node is written once by its sender."""
    workers: dict[int, list[int]] = {}
    for src, dsts, nbytes, n_parts in copies:
        sender = workers.setdefault(src, [0] * 6)
        near = far = False
        for dst in dsts:
            receiver = workers.setdefault(dst, [0] * 6)
            receiver[PIECES] += n_parts
            if src == dst:
                receiver[LOCAL] += nbytes
            elif src // node_size == dst // node_size:
                receiver[RECEIVED] += nbytes
                near = True
            else:
                receiver[FAR_RECEIVED] += nbytes
                sender[FAR_SENT] += nbytes
                far = True
        if near:
            sender[SENT] += nbytes
        if near or far:
            sender[PIECES] += n_parts
    if not workers:
        return Traffic()
    busiest = max(workers.values(), key=lambda w: (_copied(w), max(w[:2]) + max(w[2:4])))
    return Traffic(
        local=busiest[LOCAL],
        node=max(busiest[:2]),
        cluster=max(max(w[2:4]) for w in workers.values()),
        n_parts=max(w[PIECES] for w in workers.values()),
        copied=_copied(busiest),
        total=sum(map(_copied, workers.values())),
    )


def _copied(worker: list[int]) -> int:
    return sum(worker[:4]) + 2 * worker[LOCAL]


def rings_of(copies: Iterable[Copy], node_size: int) -> int:
    """Return the bytes of others' rings that stay with the worker that reads most of them; its own it has anyway."""
    touched: dict[int, dict[int, int]] = {}
    for src, dsts, nbytes, _ in copies:
        for worker in (dst for dst in dsts if dst != src and dst // node_size == src // node_size):
            rings = touched.setdefault(worker, {})
            rings[src] = min(rings.get(src, 0) + nbytes, RING_BYTES)
    return max((sum(rings.values()) for rings in touched.values()), default=0)


def realloc_traffic(config: ModelConfig, src: Layout, dst: Layout, itemsize: int, node_size: int) -> Traffic:
    """Return what moving a model's weights from one layout to another asks for."""
    return _traffic(config, *_moved_together(src, dst, node_size), itemsize, node_size)


def realloc_rings(config: ModelConfig, src: Layout, dst: Layout, itemsize: int, node_size: int) -> int:
    """Return the bytes of shared memory that this leaves with a worker (``rings_of``)."""
    return _rings(config, *_moved_together(src, dst, node_size), itemsize, node_size)


def _moved_together(src: Layout, dst: Layout, node_size: int) -> tuple[Layout, Layout]:
    """Return two layouts that stand for these: nothing changes when both meshes are shifted by whole nodes.

    Nor does it matter where disjoint meshes of whole nodes lie.
    """
    a, b = src.mesh.ranks, dst.mesh.ranks
    if a != tuple(range(a[0], a[0] + len(a))) or b != tuple(range(b[0], b[0] + len(b))):
        return src, dst
    whole = not any(n % node_size for n in (a[0], len(a), b[0], len(b)))
    apart = a[-1] < b[0] or b[-1] < a[0]
    shift = min(a[0], b[0]) // node_size * node_size
    first, second = (0, len(a)) if whole and apart else (a[0] - shift, b[0] - shift)
    return src.starting_at(first), dst.starting_at(second)


@lru_cache(maxsize=100_000)
def _traffic(config: ModelConfig, src: Layout, dst: Layout, itemsize: int, node_size: int) -> Traffic:
    return traffic_of(_copies(config, src, dst, itemsize, node_size), node_size)


@lru_cache(maxsize=100_000)
def _rings(config: ModelConfig, src: Layout, dst: Layout, itemsize: int, node_size: int) -> int:
    return rings_of(_copies(config, src, dst, itemsize, node_size), node_size)


def _copies(config: ModelConfig, src: Layout, dst: Layout, itemsize: int, node_size: int) -> Iterator[Copy]:
    for (holding, needing), (numel, n_parts) in _sizes(config, src.strategy, dst.strategy).items():
        for sender, receivers, _, n in share_out(seated(src, holding), seated(dst, needing), node_size):
            yield sender, receivers, numel * itemsize // n, -(-n_parts // n)


@lru_cache(maxsize=16384)
def _sizes(config: ModelConfig, src: ParallelStrategy, dst: ParallelStrategy) -> Sizes:
    return sizes(param_specs(config), lambda pp: stage_layers(config, pp), src, dst)


def transfer_traffic(call: Call, keys: tuple[str, ...], layout: Layout, node_size: int) -> Traffic:
    """Return what bringing a call's rows to its layout asks for."""
    copies = plan_transfer(call, keys, layout)
    return traffic_of(((c.src, (c.dst,), c.length * SCALAR_BYTES[c.dtype], 1) for c in copies), node_size)
