"""The layout choice as tables: for every MFC its options and their costs, without models or hardware."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property

from realhf.api.graph import MFC, Graph, Sync
from realhf.api.machine import Cost
from realhf.plan.compile.forwarding import couriers, later_readers, uninterrupted_rollouts
from realhf.plan.compile.program import home_mfc
from realhf.plan.search.timeline import steady_steps

FREE = Cost(0.0, 0.0)
Choice = tuple[int, ...]  # the option number of every MFC, in the order of ``graph.mfcs``


@dataclass(frozen=True)
class LayoutOption:
    """One way to run an MFC on ``ranks``; its output rows are stored on ``holders``, the ranks of its last stage.

    Costs are per call. Calls have different rows: ``compute`` is by the number of the call, cyclically. Bytes are the
    maximum over workers: ``transient`` during the call, ``resident`` all the time if this is the home layout of the
    role (for offloaded roles: while one of their calls runs). ``load`` and ``offload`` are used if this is the home
    layout of an offloaded role.
    """

    ranks: range
    holders: range
    compute: tuple[Cost, ...]
    transfer: Cost = FREE
    transient: float = 0.0
    resident: float = 0.0
    load: Cost = FREE
    offload: Cost = FREE


@dataclass(frozen=True)
class ReallocCost:
    """Cost of a reallocation; ``nbytes`` of the temporary copy and ``rings`` of persistent buffers, each per worker."""

    cost: Cost = FREE
    nbytes: float = 0.0
    rings: float = 0.0


@dataclass(frozen=True)
class MFCDeps:
    """Dependencies of an MFC, as MFC numbers.

    ``parents`` produce its inputs, ``row_sources`` hold them. Rows of the sources in ``couriers``
    (``uninterrupted_rollouts``) may come from one of these MFCs (``choose_courier``). A call of step ``s`` waits until
    ``updater`` is done with step ``s - 1 - allowed_staleness`` (-1: the weights never change). ``home_mfc`` is -1
    without a role. A consumer of the filter MFC's rows (``after_filter``) waits until it is done with the step, any
    other MFC until it is done with the step before.
    """

    parents: tuple[int, ...]
    row_sources: tuple[int, ...]
    couriers: Mapping[int, tuple[int, ...]]
    updater: int
    allowed_staleness: int
    home_mfc: int
    offloaded: bool
    batch_size: int
    after_filter: bool


@dataclass(frozen=True)
class EMASync:
    """A sync as MFC numbers: after MFC ``after``, weights move from home MFC ``source`` to home MFC ``target``."""

    sync: Sync
    after: int
    source: int
    target: int


@dataclass(frozen=True)
class Problem:
    """A layout choice. ``options`` are by MFC name; ``batch_size`` is the number of prompts per step.

    ``realloc(mfc, option, home)`` is the cost of moving weights from option ``home`` of the home MFC to an option of
    the MFC; it must be zero between equal layouts. ``sync(sync, source, target)`` is the cost of a sync between options
    of two home MFCs. Both return finite values, and are called once per argument, on demand. ``capacity`` is bytes per
    worker, ``cores`` as in ``WorkerQueues``; ``n_steps`` steps are simulated.
    """

    graph: Graph
    options: Mapping[str, Sequence[LayoutOption]]
    n_ranks: int
    batch_size: int
    capacity: float
    realloc: Callable[[str, int, int], ReallocCost] = lambda mfc, option, home: ReallocCost()
    sync: Callable[[Sync, int, int], Cost] = lambda sync, source, target: FREE
    max_staleness: int = 0
    call_seconds: float = 0.0
    cores: float = 0.0
    n_steps: int = 3

    def __post_init__(self) -> None:
        if self.capacity <= 0:
            raise ValueError(f"the capacity of a worker must be positive, got {self.capacity:.0f} bytes")
        if empty := [m.name for m in self.graph.mfcs if not self.options.get(m.name)]:
            raise ValueError(f"no layout fits {', '.join(empty)}")
        invalid = [f"{name} on {o.ranks}" for name, some in self.options.items() for o in some
                   if not all(0 <= r.start < r.stop <= self.n_ranks and r.step == 1
                              for r in (o.ranks, o.holders))]  # fmt: skip
        if invalid:
            raise ValueError(f"options must use contiguous ranks from 0 to {self.n_ranks - 1}: {'; '.join(invalid)}")

    @cached_property
    def steady_steps(self) -> tuple[int, int]:
        """The steps between whose ends the time per step is averaged; equal if only one step is simulated."""
        return steady_steps(self.n_steps, self.max_staleness)

    @property
    def n_steady_steps(self) -> int:
        return self.steady_steps[1] - self.steady_steps[0]

    @cached_property
    def table(self) -> tuple[tuple[LayoutOption, ...], ...]:
        """Options of every MFC, in the order of ``graph.mfcs``."""
        return tuple(tuple(self.options[m.name]) for m in self.graph.mfcs)

    @cached_property
    def number(self) -> dict[str, int]:
        return {m.name: i for i, m in enumerate(self.graph.mfcs)}

    @cached_property
    def order(self) -> tuple[int, ...]:
        """MFC numbers in the order in which the scheduler considers them."""
        return tuple(self.number[m.name] for m in self.graph.topological)

    def home_mfc(self, role: str) -> int:
        return self.number[home_mfc(self.graph, role).name]

    @property
    def filter_mfc(self) -> int:
        """The number of the MFC that filters rows, or -1."""
        return self.number[self.graph.filter_mfc.name] if self.graph.filter_mfc else -1

    @cached_property
    def deps(self) -> tuple[MFCDeps, ...]:
        graph, data = self.graph, set(self.graph.dataset_keys)
        fetcher = self.number[graph.fetcher.name]
        deps = []
        for mfc in graph.mfcs:
            parents = tuple(self.number[p.name] for p in graph.parents(mfc))
            sources = (*parents, fetcher) if data & set(mfc.inputs) else parents
            updater = graph.updater(mfc.role) if mfc.role else None
            number, home = self.number[updater.name] if updater else -1, self.home_mfc(mfc.role) if mfc.role else -1
            staleness, offloaded = mfc.allowed_staleness(self.max_staleness), mfc.role in graph.offloaded
            is_after = mfc.name in graph.after_filter
            deps.append(MFCDeps(parents, sources, self._couriers(mfc), number, staleness, home, offloaded,
                                mfc.batch_size, is_after))  # fmt: skip
        return tuple(deps)

    def _couriers(self, reader: MFC) -> dict[int, tuple[int, ...]]:
        """Return the possible couriers of rows to an MFC, by the rollout that produces them."""
        rollouts = uninterrupted_rollouts(self.graph, self.max_staleness)
        return {self.number[rollout.name]: tuple(self.number[m.name] for m in couriers(self.graph, rollout))
                for rollout in rollouts if reader in later_readers(self.graph, rollout)}  # fmt: skip

    @cached_property
    def ema_syncs(self) -> tuple[EMASync, ...]:
        """Syncs after an MFC with a role; only those are compiled into the program."""
        syncs = (s for s in self.graph.syncs if self.graph[s.after].role)
        return tuple(EMASync(s, self.number[s.after], self.home_mfc(s.source), self.home_mfc(s.target)) for s in syncs)

    @cached_property
    def realloc_cost(self) -> Callable[[int, int, int], ReallocCost]:
        """``realloc`` by MFC number, cached."""
        return cache(lambda mfc, option, home: self.realloc(self.graph.mfcs[mfc].name, option, home))

    @cached_property
    def sync_cost(self) -> Callable[[int, int, int], Cost]:
        """``sync`` by sync number, cached."""
        return cache(lambda number, source, target: self.sync(self.ema_syncs[number].sync, source, target))
