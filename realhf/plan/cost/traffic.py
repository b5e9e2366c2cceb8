"""Traffic of an exchange on its busiest worker, computed from the routes and copies of its plan."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache, partial

from realhf.api.batch_meta import SCALAR_BYTES
from realhf.api.layout import Layout, ParallelStrategy
from realhf.api.messages import PrepareCall
from realhf.api.model_config import ModelConfig
from realhf.arch.lora import own_specs
from realhf.arch.param_specs import stage_layers
from realhf.plan.compile import realloc
from realhf.plan.compile.transfer import row_transfers
from realhf.plan.cost.speed import Traffic

Copy = tuple[int, Sequence[int], int, int]  # (sender, receivers, bytes, number of slices)
Delivery = tuple[int, int, realloc.Senders]  # (elements, number of slices, senders and receivers)
SLOT_BYTES, N_SLOTS = 4 << 20, 4
"""Shared-memory ring of a worker (comm/shared_memory.py). Smaller slots cost more wake-ups, larger rings do not stay in
the cache (measured with benchmarks/bench_realloc.py)."""
RING_BYTES = N_SLOTS * SLOT_BYTES
SENT, RECEIVED, FAR_SENT, FAR_RECEIVED, LOCAL, N_PARTS = range(6)


class _Counters:
    def __init__(self) -> None:
        self._counts: defaultdict[int, list[int]] = defaultdict(lambda: [0] * 6)

    def add(self, workers: Sequence[int], column: int, nbytes: int, n_parts: int) -> None:
        for worker in workers:
            counts = self._counts[worker]
            counts[column] += nbytes
            counts[N_PARTS] += n_parts

    def add_sent(self, senders: Sequence[int], receivers: Sequence[int], nbytes: int, n_parts: int, near: bool) -> None:
        """Count ``nbytes`` from each sender to all receivers; receivers on its node (``near``) share one copy."""
        self.add(senders, SENT if near else FAR_SENT, nbytes if near else nbytes * len(receivers), n_parts)
        self.add(receivers, RECEIVED if near else FAR_RECEIVED, nbytes * len(senders), n_parts * len(senders))

    def traffic(self) -> Traffic:
        if not self._counts:
            return Traffic()
        workers = self._counts.values()
        busiest = max(workers, key=lambda w: (_copied(w), max(w[:2]) + max(w[2:4])))
        return Traffic(local=busiest[LOCAL], node=max(busiest[:2]), cluster=max(max(w[2:4]) for w in workers),
                       n_parts=max(w[N_PARTS] for w in workers), copied=_copied(busiest),
                       total=sum(map(_copied, workers)))  # fmt: skip


def traffic_of(copies: Iterable[Copy], node_size: int) -> Traffic:
    """Return the traffic of copies; the sender writes data for several receivers on its node once."""
    counters = _Counters()
    for src, dsts, nbytes, n_parts in copies:
        others: dict[int, list[int]] = {}
        for dst in dsts:
            if dst == src:
                counters.add((src,), LOCAL, nbytes, n_parts)
            else:
                others.setdefault(dst // node_size, []).append(dst)
        for node, receivers in others.items():
            counters.add_sent((src,), receivers, nbytes, n_parts, node == src // node_size)
    return counters.traffic()


def _copied(worker: list[int]) -> int:
    return sum(worker[:4]) + 2 * worker[LOCAL]


def ring_bytes_of(copies: Iterable[Copy], node_size: int) -> int:
    """Return the largest total, over workers, of bytes mapped from rings of other workers on their node."""
    touched: dict[int, dict[int, int]] = {}
    for src, dsts, nbytes, _ in copies:
        for worker in (dst for dst in dsts if dst != src and dst // node_size == src // node_size):
            rings = touched.setdefault(worker, {})
            rings[src] = min(rings.get(src, 0) + nbytes, RING_BYTES)
    return max((sum(rings.values()) for rings in touched.values()), default=0)


def realloc_traffic(config: ModelConfig, src: Layout, dst: Layout, itemsize: int, node_size: int) -> Traffic:
    return _traffic(config, *_canonical(src, dst, node_size), itemsize, node_size)


def realloc_ring_bytes(config: ModelConfig, src: Layout, dst: Layout, itemsize: int, node_size: int) -> int:
    return _ring_bytes(config, *_canonical(src, dst, node_size), itemsize, node_size)


def _canonical(src: Layout, dst: Layout, node_size: int) -> tuple[Layout, Layout]:
    """Return equivalent layouts with canonical first ranks, which are cache keys.

    Traffic is invariant to shifting both meshes by whole nodes, and to the location of disjoint meshes of whole nodes.
    """
    a, b = src.mesh.ranks, dst.mesh.ranks
    if a != tuple(range(a[0], a[0] + len(a))) or b != tuple(range(b[0], b[0] + len(b))):
        return src, dst
    whole_nodes = not any(n % node_size for n in (a[0], len(a), b[0], len(b)))
    disjoint = a[-1] < b[0] or b[-1] < a[0]
    shift = min(a[0], b[0]) // node_size * node_size
    first, second = (0, len(a)) if whole_nodes and disjoint else (a[0] - shift, b[0] - shift)
    return src.starting_at(first), dst.starting_at(second)


@lru_cache(maxsize=100_000)
def _traffic(config: ModelConfig, src: Layout, dst: Layout, itemsize: int, node_size: int) -> Traffic:
    counters = _Counters()
    for numel, n_parts, (kept, sent) in _deliveries(config, src, dst, node_size):
        counters.add(kept, LOCAL, numel * itemsize, n_parts)
        for senders, receivers in sent:
            share = numel * itemsize // len(senders), -(-n_parts // len(senders))
            counters.add_sent(senders, receivers, *share, near=senders[0] // node_size == receivers[0] // node_size)
    return counters.traffic()


@lru_cache(maxsize=100_000)
def _ring_bytes(config: ModelConfig, src: Layout, dst: Layout, itemsize: int, node_size: int) -> int:
    copies = (
        (sender, receivers, numel * itemsize // len(senders), 1)
        for numel, _, (_, sent) in _deliveries(config, src, dst, node_size)
        for senders, receivers in sent
        for sender in senders
    )
    return ring_bytes_of(copies, node_size)


def _deliveries(config: ModelConfig, src: Layout, dst: Layout, node_size: int) -> Iterator[Delivery]:
    """Yield one delivery for everything that the same workers hold and the same workers need."""
    both = (layout.strategy for layout in (src, dst))  # replicas hold and need the same
    cuts = (strategy if strategy.zero3 else replace(strategy, dp=strategy.expert_dp) for strategy in both)
    for (holding, needing), (numel, n_parts) in _sizes(config, *cuts).items():
        holders, needers = realloc.coord_ranks(src, holding), realloc.coord_ranks(dst, needing)
        yield numel, n_parts, realloc.assign_senders(holders, needers, node_size)


@lru_cache(maxsize=16384)
def _sizes(config: ModelConfig, src: ParallelStrategy, dst: ParallelStrategy) -> realloc.TransferSizes:
    return realloc.transfer_sizes(_kinds(config), partial(stage_layers, config), src, dst)


@lru_cache(maxsize=256)
def _kinds(config: ModelConfig) -> realloc.ParamKinds:
    return realloc.count_param_kinds(own_specs(config))


def transfer_traffic(call: PrepareCall, keys: tuple[str, ...], layout: Layout, node_size: int) -> Traffic:
    totals: dict[tuple[int, tuple[int, ...]], list[int]] = {}
    for _, _, src, dsts, dtype, length in row_transfers(call, keys, layout):
        counts = totals.setdefault((src, dsts), [0, 0])
        counts[0] += length * SCALAR_BYTES[dtype]
        counts[1] += 1
    counters = _Counters()
    for (src, dsts), (nbytes, n_parts) in totals.items():  # every receiver gets a copy of its own
        for is_near, sent, received in ((True, SENT, RECEIVED), (False, FAR_SENT, FAR_RECEIVED)):
            receivers = [dst for dst in dsts if (dst // node_size == src // node_size) == is_near]
            counters.add((src,), sent, nbytes * len(receivers), n_parts * len(receivers))
            counters.add(receivers, received, nbytes, n_parts)
    return counters.traffic()
