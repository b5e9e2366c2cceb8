"""How one call may be done in a layout: the micro-batching that suits it, what that takes, and how many bytes."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from realhf.api.batch_meta import RowId
from realhf.api.execution_plan import MicroBatching, Placement
from realhf.api.graph import MFC, Kind
from realhf.api.layout import DeviceMesh, Layout, ParallelStrategy
from realhf.api.machine import Cost, Hardware
from realhf.plan.compile.dp_partition import partition_rows
from realhf.plan.cost.cost import BatchRows, CostModel
from realhf.plan.cost.memory import MemoryModel
from realhf.plan.cost.speed import Traffic

MIN_MICRO_BATCH_TOKENS = 512
MIN_NUM_SEQS = 8
Key = tuple[str, ParallelStrategy, int | DeviceMesh]
"""A call, how it is cut, and where it starts in a node (or its very workers, where they are no run)."""


@dataclass(frozen=True)
class Candidate:
    """A layout that a call may have: its micro-batching, its costs, its bytes."""

    placement: Placement
    cost: Cost
    transfer: Cost
    transient: float
    resident: float

    @property
    def bytes(self) -> float:
        return self.transient + self.resident


@dataclass(frozen=True)
class Candidates:
    """All that is known of single calls. ``limits`` are the user's micro-batching options by MFC."""

    cost: CostModel
    memory: MemoryModel
    hardware: Hardware
    batch_size: int
    limits: Mapping[str, MicroBatching]

    @property
    def capacity(self) -> float:
        """Bytes of a worker for models and what they do."""
        return self.hardware.usable - self.memory.runtime

    def of(self, mfc: MFC, layout: Layout, share: float = 1.0) -> Candidate:
        """Return a layout with the fastest micro-batching with which the call fits ``share`` of a worker's capacity.

        Where it does not fit with any, that is the leanest.
        """
        first, ranks = layout.mesh.ranks[0], layout.mesh.ranks
        is_run = ranks[-1] - first == len(ranks) - 1 and ranks == tuple(range(first, ranks[-1] + 1))
        # what a run of workers costs depends on where nodes begin in it
        key = (mfc.name, layout.strategy, first % self.hardware.node_size if is_run else layout.mesh)
        if (key, share) not in self._known:
            self._known[key, share] = self._settled(mfc, layout, key, share * self.capacity)
        known = self._known[key, share]
        return replace(known, placement=replace(known.placement, layout=layout))

    def _settled(self, mfc: MFC, layout: Layout, key: Key, room: float) -> Candidate:
        rows, sizes = self.rows(mfc, layout.strategy.dp), dict[MicroBatching, float]()
        resident = self.memory.resident(mfc.role, layout.strategy).total if mfc.role else 0.0
        enough = 3 if layout.strategy.pp > 1 else 1  # smaller micro-batches leave smaller bubbles
        for limits in self._limits(mfc):
            if (key, limits) not in self._sizes:
                taken = self.memory.transient(mfc, Placement(layout, limits), rows, layout)
                self._sizes[key, limits] = taken.total
            sizes[limits] = self._sizes[key, limits]
            if sum(size + resident <= room for size in sizes.values()) == enough:
                break
        fitting = [limits for limits, size in sizes.items() if size + resident <= room]
        tried = []
        for limits in fitting or [min(sizes, key=lambda limits: sizes[limits])]:
            if (key, limits) not in self._priced:
                self._priced[key, limits] = self._cost(mfc, Placement(layout, limits), rows)
            tried.append((limits, self._priced[key, limits]))
        limits, cost = min(tried, key=lambda pair: pair[1].seconds)
        transfer = self._transfer(mfc, layout, rows)
        return Candidate(Placement(layout, limits), cost, transfer, sizes[limits], resident)

    def _limits(self, mfc: MFC) -> Iterator[MicroBatching]:
        """Return the user's micro-batching, then finer ones: fewer tokens at a time, in generation fewer rows."""
        limits = self.limits[mfc.name]
        yield limits
        sampling = self.cost.sampling
        if mfc.kind is Kind.GENERATE and sampling is not None:
            slots = limits.slots(sampling.max_num_seqs)
            while slots >= 2 * MIN_NUM_SEQS:
                slots //= 2
                yield replace(limits, max_num_seqs=slots)
        else:
            while limits.max_tokens_per_mb >= 2 * MIN_MICRO_BATCH_TOKENS:
                limits = replace(limits, max_tokens_per_mb=limits.max_tokens_per_mb // 2)
                yield limits

    def _cost(self, mfc: MFC, placement: Placement, rows: Sequence[BatchRows]) -> Cost:
        if self.hardware.cores:
            return self.cost.compute(mfc, placement, rows)
        # every worker has a device of its own: the busiest replica tells how long it takes
        alone = self.cost.compute(mfc, placement, [_busiest(rows, mfc.n_minibatches)])
        return Cost(alone.seconds, alone.seconds * placement.layout.strategy.world)

    def _transfer(self, mfc: MFC, layout: Layout, rows: Sequence[BatchRows]) -> Cost:
        """What bringing the rows takes when all of them lie elsewhere."""
        size = 8 + 4 * (len(mfc.inputs) - 1)
        nbytes = size * max(sum(r.lengths) for r in rows)
        n_parts = len(mfc.inputs) * max(len(r.ids) for r in rows)
        copied = nbytes * layout.strategy.tp * layout.strategy.pp
        total = 2 * copied * layout.strategy.dp
        return self.cost.exchange(Traffic(node=nbytes, n_parts=n_parts, copied=copied, total=total))

    def rows(self, mfc: MFC, dp: int) -> tuple[BatchRows, ...]:
        """Return what each of ``dp`` ranks computes in one call of an MFC."""
        workload, n_positions = self.cost.workload, min(mfc.batch_size, self.batch_size)
        prompts = mfc.kind is Kind.GENERATE or not workload.sampled
        key = (prompts, n_positions, mfc.n_minibatches, dp)
        if key not in self._dealt:
            rows: list[tuple[RowId, int]] = []
            for position in range(n_positions):
                rows += workload.fetched(position) if prompts else workload.drawn(position)
            ids, lengths = [i for i, _ in rows], [n for _, n in rows]
            assignment, minibatches = partition_rows(ids, [8 * n for n in lengths], dp, mfc.n_minibatches)
            self._dealt[key] = tuple(
                BatchRows(
                    tuple(ids[i] for i in part), tuple(lengths[i] for i in part), tuple(minibatches[i] for i in part)
                )
                for part in assignment
            )
        return self._dealt[key]

    @cached_property
    def _dealt(self) -> dict[tuple[bool, int, int, int], tuple[BatchRows, ...]]:
        return {}

    @cached_property
    def _known(self) -> dict[tuple[Key, float], Candidate]:
        return {}

    @cached_property
    def _sizes(self) -> dict[tuple[Key, MicroBatching], float]:
        return {}

    @cached_property
    def _priced(self) -> dict[tuple[Key, MicroBatching], Cost]:
        return {}


def _busiest(rows: Sequence[BatchRows], n_minibatches: int) -> BatchRows:
    """Return the rows of a rank that has most to do in every mini-batch: at the end of each all ranks meet."""
    ids: tuple[RowId, ...] = ()
    lengths: tuple[int, ...] = ()
    numbers: tuple[int, ...] = ()
    for number in range(n_minibatches):
        mine = max((some.of_minibatch(number) for some in rows), key=lambda part: sum(part[1]))
        ids, lengths, numbers = ids + mine[0], lengths + mine[1], numbers + (number,) * len(mine[0])
    return BatchRows(ids, lengths, numbers)
