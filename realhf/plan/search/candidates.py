"""Candidate layouts of a call, each with the best micro-batching, its cost and its memory."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

from realhf.api.batch_meta import RowId
from realhf.api.config.choices import Backend, Recompute
from realhf.api.config.option import AUTO
from realhf.api.execution_plan import MemorySaving, MicroBatching, Placement
from realhf.api.graph import MFC, Kind
from realhf.api.layout import DeviceMesh, Layout, ParallelStrategy
from realhf.api.machine import Cost, Hardware
from realhf.plan.compile.micro_batch import partition_rows
from realhf.plan.cost.cost import BatchRows, CostModel, split_rows
from realhf.plan.cost.memory import MemoryModel
from realhf.plan.cost.speed import Traffic

RECOMPUTED = (Recompute.selective, Recompute.full)
MIN_MICRO_BATCH_TOKENS = 512
MIN_NUM_SEQS = 8
Key = tuple[str, ParallelStrategy, int | DeviceMesh]
"""MFC name, strategy, and the first rank modulo the node size (or the mesh if its ranks are not contiguous)."""
Ways = tuple[MicroBatching, MemorySaving | None]


@dataclass(frozen=True)
class Candidate:
    placement: Placement
    cost: Cost
    transient: float
    resident: float

    @property
    def bytes(self) -> float:
        return self.transient + self.resident


@dataclass(frozen=True, eq=False)
class Candidates:
    """Computes candidates and caches them. ``limits`` are the micro-batching options by MFC.

    Calls in ``served`` run in an inference server, which has no pipeline stages and shards experts itself.
    """

    cost: CostModel
    memory: MemoryModel
    hardware: Hardware
    batch_size: int
    limits: Mapping[str, MicroBatching]
    served: frozenset[str] = frozenset()
    _rows: dict[tuple[bool, int, int, int], tuple[BatchRows, ...]] = field(default_factory=dict, init=False, repr=False)
    _candidates: dict[tuple[Key, float], list[Candidate]] = field(default_factory=dict, init=False, repr=False)
    _sizes: dict[tuple[Key, Ways], float] = field(default_factory=dict, init=False, repr=False)
    _costs: dict[tuple[Key, Ways], Cost] = field(default_factory=dict, init=False, repr=False)
    _transfers: dict[Key, Cost] = field(default_factory=dict, init=False, repr=False)

    @property
    def capacity(self) -> float:
        """Bytes of a worker that are available to models."""
        return self.hardware.usable - self.memory.runtime

    def of(self, mfc: MFC, layout: Layout, share: float = 1.0) -> Candidate:
        """Return the fastest candidate that fits in a ``share`` of memory, or the smallest.

        Candidates differ in micro-batching and, where options of the role are ``auto``, in how they save memory.
        """
        return self.variants(mfc, layout, share)[0]

    def variants(self, mfc: MFC, layout: Layout, share: float = 1.0) -> list[Candidate]:
        """Return ``of``, then the candidates with less memory that the planner may choose instead, fastest first."""
        key = self.key(mfc, layout)
        if (key, share) not in self._candidates:
            available = share * self.capacity
            found = [self._best(mfc, layout, key, available, saving) for saving in self.savings(mfc)]
            self._candidates[key, share] = _frontier(found, available)
        some = self._candidates[key, share]
        return [replace(candidate, placement=replace(candidate.placement, layout=layout)) for candidate in some]

    def key(self, mfc: MFC, layout: Layout) -> Key:
        """Return what determines costs: contiguous ranks only by their position relative to node boundaries."""
        first, ranks = layout.mesh.ranks[0], layout.mesh.ranks
        is_contiguous = ranks == tuple(range(first, first + len(ranks)))
        return mfc.name, layout.strategy, first % self.hardware.node_size if is_contiguous else layout.mesh

    def savings(self, mfc: MFC) -> list[MemorySaving | None]:
        """Return how a call may save memory; only None if no option of its role is ``auto``."""
        if mfc.role is None or not mfc.is_train:
            return [None]
        spec = self.cost.roles[mfc.role].spec
        recomputes = [None, *RECOMPUTED] if spec.gradient_checkpointing == AUTO else [spec.recompute]
        offloads = [spec.optimizer.offload is True]
        if spec.optimizer.offload == AUTO:
            offloads = [False] if spec.backend is Backend.megatron else [False, True]
        if AUTO not in (spec.gradient_checkpointing, spec.optimizer.offload):
            return [None]
        return [MemorySaving(recompute, offload) for recompute in recomputes for offload in offloads]

    def _best(self, mfc: MFC, layout: Layout, key: Key, available: float, saving: MemorySaving | None) -> Candidate:
        rows, sizes = self.rows(mfc, layout.strategy.dp), dict[MicroBatching, float]()
        resident = self.memory.resident(mfc.role, layout.strategy, saving=saving).total if mfc.role else 0.0
        placed = lambda limits: Placement(layout, limits, saving=saving)
        n_wanted = 3 if layout.strategy.pp > 1 else 1  # smaller micro-batches reduce pipeline bubbles
        for limits in self._limits(mfc):
            ways = limits, saving
            if (key, ways) not in self._sizes:
                self._sizes[key, ways] = self.memory.transient(mfc, placed(limits), rows, layout).total
            sizes[limits] = self._sizes[key, ways]
            if sum(size + resident <= available for size in sizes.values()) == n_wanted:
                break
        fitting = [limits for limits, size in sizes.items() if size + resident <= available]
        costs = []
        for limits in fitting or [min(sizes, key=lambda limits: sizes[limits])]:
            ways = limits, saving
            if (key, ways) not in self._costs:
                self._costs[key, ways] = self._cost(mfc, placed(limits), rows)
            costs.append((limits, self._costs[key, ways]))
        limits, cost = min(costs, key=lambda pair: pair[1].seconds)
        return Candidate(placed(limits), cost, sizes[limits], resident)

    def _limits(self, mfc: MFC) -> Iterator[MicroBatching]:
        """Yield the configured micro-batching, then smaller ones: fewer tokens, or fewer sequences in generation."""
        limits = self.limits[mfc.name]
        yield limits
        sampling = self.cost.sampling
        if mfc.kind is Kind.GENERATE and sampling is not None:
            n = limits.limit_num_seqs(sampling.max_num_seqs)
            while n >= 2 * MIN_NUM_SEQS:
                n //= 2
                yield replace(limits, max_num_seqs=n)
        else:
            while limits.max_tokens_per_mb >= 2 * MIN_MICRO_BATCH_TOKENS:
                limits = replace(limits, max_tokens_per_mb=limits.max_tokens_per_mb // 2)
                yield limits

    def _cost(self, mfc: MFC, placement: Placement, rows: Sequence[BatchRows]) -> Cost:
        if self.hardware.cores:
            return self.cost.compute(mfc, placement, rows)
        # without shared cores, the slowest replica determines the time
        slowest = [_busiest(rows, mfc.n_minibatches)]
        if mfc.kind is Kind.GENERATE:
            slowest = self._longest(mfc, rows)
        seconds = max(self.cost.compute(mfc, placement, [replica]).seconds for replica in slowest)
        return Cost(seconds, seconds * placement.layout.strategy.world)

    def _longest(self, mfc: MFC, rows: Sequence[BatchRows]) -> list[BatchRows]:
        """Return the replicas that may be the slowest in generation: with the most tokens, and the longest response."""
        sampled = {replica: self.cost.sampled(mfc, replica) for replica in rows if replica.ids}
        tokens = {replica: sum(replica.lengths) + sum(responses) for replica, responses in sampled.items()}
        most = max(sampled, key=lambda replica: tokens[replica])
        longest = max(sampled, key=lambda replica: (max(sampled[replica]), tokens[replica]))
        return [most] if longest is most else [most, longest]

    def transfer(self, mfc: MFC, layout: Layout) -> Cost:
        """Return the cost of transferring the rows if all of them are on other workers."""
        key = self.key(mfc, layout)
        if key not in self._transfers:
            self._transfers[key] = self._transfer(mfc, layout, self.rows(mfc, layout.strategy.dp))
        return self._transfers[key]

    def _transfer(self, mfc: MFC, layout: Layout, rows: Sequence[BatchRows]) -> Cost:
        size = 8 + 4 * (len(mfc.inputs) - 1)
        nbytes = size * max(sum(r.lengths) for r in rows)
        n_parts = len(mfc.inputs) * max(len(r.ids) for r in rows)
        copied = nbytes * layout.strategy.tp * layout.strategy.pp
        total = 2 * copied * layout.strategy.dp
        return self.cost.exchange(Traffic(node=nbytes, n_parts=n_parts, copied=copied, total=total))

    def rows(self, mfc: MFC, dp: int) -> tuple[BatchRows, ...]:
        """Return the rows of each data-parallel rank in one call of an MFC."""
        workload, n_positions = self.cost.workload, min(mfc.batch_size, self.batch_size)
        prompts = mfc.kind is Kind.GENERATE or not workload.is_generated
        key = (prompts, n_positions, mfc.n_minibatches, dp)
        if key not in self._rows:
            rows: list[tuple[RowId, int]] = []
            for position in range(n_positions):
                rows += workload.dataset_rows(position) if prompts else workload.sampled_rows(position)
            ids, lengths = [i for i, _ in rows], [n for _, n in rows]
            assignment, minibatches = partition_rows(ids, [8 * n for n in lengths], dp, mfc.n_minibatches)
            self._rows[key] = split_rows(ids, lengths, minibatches, assignment)
        return self._rows[key]


def _frontier(found: Sequence[Candidate], available: float) -> list[Candidate]:
    """Return the fastest candidate that fits, or else the smallest; then slower ones in order of decreasing memory."""
    kept: list[Candidate] = []
    for candidate in sorted(found, key=lambda c: (c.bytes > available, c.cost.seconds, c.bytes)):
        if candidate.bytes <= available and all(candidate.bytes < other.bytes for other in kept):
            kept.append(candidate)
    return kept or [min(found, key=lambda c: (c.bytes, c.cost.seconds))]


def _busiest(rows: Sequence[BatchRows], n_minibatches: int) -> BatchRows:
    """Return the rows of the busiest rank of each mini-batch; all ranks synchronize after a mini-batch."""
    busiest = [max((r.of_minibatch(n) for r in rows), key=lambda part: sum(part[1])) for n in range(n_minibatches)]
    ids, lengths = (tuple(chain.from_iterable(some)) for some in zip(*busiest, strict=True))
    return BatchRows(ids, lengths, tuple(n for n, part in enumerate(busiest) for _ in part[0]))
