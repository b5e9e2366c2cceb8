"""What an exchange asks of its busiest worker, from the very routes and copies that will be carried out."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache

from realhf.api.batch_meta import SCALAR_BYTES
from realhf.api.layout import Layout, ParallelStrategy
from realhf.api.messages import PrepareCall
from realhf.api.model_config import ModelConfig
from realhf.arch.param_specs import param_specs, stage_layers
from realhf.plan.compile.realloc import (
    ParamKinds,
    Senders,
    TransferSizes,
    assign_senders,
    coord_ranks,
    count_param_kinds,
    transfer_sizes,
)
from realhf.plan.compile.transfer import row_transfers
from realhf.plan.cost.speed import Traffic

Copy = tuple[int, Sequence[int], int, int]
"""(sender, receivers, bytes, pieces)"""
SLOT_BYTES, N_SLOTS = 4 << 20, 4
"""A worker's ring, through which others of its host read what it sends (comm/shared_memory.py). Smaller slots cost more
waking up, a larger ring does not stay in the cache (measured, benchmarks/bench_realloc)."""
RING_BYTES = N_SLOTS * SLOT_BYTES
SENT, RECEIVED, FAR_SENT, FAR_RECEIVED, LOCAL, PIECES = range(6)


class _Workers:
    """What every worker sends, receives and copies, in the end."""

    def __init__(self) -> None:
        self._counts: defaultdict[int, list[int]] = defaultdict(lambda: [0] * 6)

    def keep(self, workers: Sequence[int], nbytes: int, n_parts: int) -> None:
        """Count what workers have already, in another place."""
        for worker in workers:
            counts = self._counts[worker]
            counts[LOCAL] += nbytes
            counts[PIECES] += n_parts

    def give(self, senders: Sequence[int], receivers: Sequence[int], nbytes: int, n_parts: int, near: bool) -> None:
        """Count what each sender gives to all receivers; those of its node (``near``) read what it wrote once."""
        for src in senders:
            counts = self._counts[src]
            counts[SENT if near else FAR_SENT] += nbytes if near else nbytes * len(receivers)
            counts[PIECES] += n_parts
        for dst in receivers:
            counts = self._counts[dst]
            counts[RECEIVED if near else FAR_RECEIVED] += nbytes * len(senders)
            counts[PIECES] += n_parts * len(senders)

    def traffic(self) -> Traffic:
        if not self._counts:
            return Traffic()
        workers = self._counts.values()
        busiest = max(workers, key=lambda w: (_copied(w), max(w[:2]) + max(w[2:4])))
        return Traffic(
            local=busiest[LOCAL],
            node=max(busiest[:2]),
            cluster=max(max(w[2:4]) for w in workers),
            n_parts=max(w[PIECES] for w in workers),
            copied=_copied(busiest),
            total=sum(map(_copied, workers)),
        )


def traffic_of(copies: Iterable[Copy], node_size: int) -> Traffic:
    """Return the traffic of copies; what has several receivers on a node is written once by its sender."""
    workers = _Workers()
    for src, dsts, nbytes, n_parts in copies:
        others: dict[int, list[int]] = {}
        for dst in dsts:
            if dst == src:
                workers.keep((src,), nbytes, n_parts)
            else:
                others.setdefault(dst // node_size, []).append(dst)
        for node, receivers in others.items():
            workers.give((src,), receivers, nbytes, n_parts, node == src // node_size)
    return workers.traffic()


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
    workers = _Workers()
    for numel, n_parts, (kept, given) in _deliveries(config, src, dst, node_size):
        workers.keep(kept, numel * itemsize, n_parts)
        for senders, receivers in given:
            share = numel * itemsize // len(senders), -(-n_parts // len(senders))
            workers.give(senders, receivers, *share, near=senders[0] // node_size == receivers[0] // node_size)
    return workers.traffic()


@lru_cache(maxsize=100_000)
def _rings(config: ModelConfig, src: Layout, dst: Layout, itemsize: int, node_size: int) -> int:
    copies = (
        (sender, receivers, numel * itemsize // len(senders), 1)
        for numel, _, (_, given) in _deliveries(config, src, dst, node_size)
        for senders, receivers in given
        for sender in senders
    )
    return rings_of(copies, node_size)


def _deliveries(config: ModelConfig, src: Layout, dst: Layout, node_size: int) -> Iterator[tuple[int, int, Senders]]:
    """Yield (elements, parts, deliveries) for everything that the same workers hold and the same workers need."""
    cuts = (replace(layout.strategy, dp=1) for layout in (src, dst))  # replicas hold and need the same
    for (holding, needing), (numel, n_parts) in _sizes(config, *cuts).items():
        yield numel, n_parts, assign_senders(coord_ranks(src, holding), coord_ranks(dst, needing), node_size)


@lru_cache(maxsize=16384)
def _sizes(config: ModelConfig, src: ParallelStrategy, dst: ParallelStrategy) -> TransferSizes:
    return transfer_sizes(_kinds(config), lambda pp: stage_layers(config, pp), src, dst)


@lru_cache(maxsize=256)
def _kinds(config: ModelConfig) -> ParamKinds:
    return count_param_kinds(param_specs(config))


def transfer_traffic(call: PrepareCall, keys: tuple[str, ...], layout: Layout, node_size: int) -> Traffic:
    """Return what bringing a call's rows to its layout asks for."""
    found: dict[tuple[int, tuple[int, ...]], list[int]] = {}
    for _, _, src, dsts, dtype, length in row_transfers(call, keys, layout):
        counts = found.setdefault((src, dsts), [0, 0])
        counts[0] += length * SCALAR_BYTES[dtype]
        counts[1] += 1
    each = ((src, (dst,), nbytes, n_parts) for (src, dsts), (nbytes, n_parts) in found.items() for dst in dsts)
    return traffic_of(each, node_size)
