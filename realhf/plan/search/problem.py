"""The choice of layouts as tables: for every MFC its options and what each takes. Neither models nor hardware."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property

from realhf.api.graph import Graph, Sync
from realhf.api.machine import Cost
from realhf.plan.search.timeline import n_steady_steps

FREE = Cost(0.0, 0.0)
Choice = tuple[int, ...]
"""The number of an option for every MFC, in the order of ``graph.mfcs``."""


@dataclass(frozen=True)
class LayoutOption:
    """One way to run an MFC: on ``ranks``, of which ``holders`` (its last stage) have the output rows afterwards.

    Costs are those of one call, bytes those of the worker that needs most. ``transient`` is needed while the call runs,
    ``resident`` all the time where the weights of the MFC's role are at home in this layout (for offloaded roles: while
    a call of the role runs). ``load`` and ``offload`` matter for homes of offloaded roles.
    """

    ranks: range
    holders: range
    compute: Cost
    transfer: Cost = FREE
    transient: float = 0.0
    resident: float = 0.0
    load: Cost = FREE
    offload: Cost = FREE


@dataclass(frozen=True)
class ReallocCost:
    """Bringing weights to a layout that is not their home; the copy has ``nbytes`` on the worker that needs most.

    ``rings`` are bytes that stay with every worker that takes part.
    """

    cost: Cost = FREE
    nbytes: float = 0.0
    rings: float = 0.0


@dataclass(frozen=True)
class MFCDeps:
    """What an MFC has to do with others, by number: who makes its inputs, who holds them, who keeps its weights.

    ``updater`` must be done with the step that lies ``lag`` steps before the one before a call; -1: its weights never
    change. ``keeper`` is the MFC in whose layout the role is at home, -1 without a role.
    """

    parents: tuple[int, ...]
    row_sources: tuple[int, ...]
    updater: int
    allowed_staleness: int
    home_mfc: int
    offloaded: bool
    batch_size: int


@dataclass(frozen=True)
class EMASync:
    """A sync by numbers: after MFC ``after``, weights go from the home of MFC ``source`` to that of ``target``."""

    sync: Sync
    after: int
    source: int
    target: int


@dataclass(frozen=True)
class Problem:
    """What there is to choose. ``options`` are by MFC name; ``batch_size`` counts the prompts of a step.

    ``move(mfc, option, home)`` brings the weights of an MFC's role from the option ``home`` of its keeper to an option
    of the MFC, and costs nothing between equal layouts. ``follow(sync, source, target)`` is what a sync costs between
    options of the keepers of its two roles. Both are asked once for what is looked at, and never for the rest. All that
    they say is finite. ``capacity`` is bytes of a worker, ``cores`` as in ``simulate``; ``n_steps`` are simulated.
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
        stray = [f"{name} on {o.ranks}" for name, some in self.options.items() for o in some if not self._holds(o)]
        if stray:
            raise ValueError(f"of ranks 0 to {self.n_ranks - 1}, in steps of 1: {'; '.join(stray)}")

    def _holds(self, option: LayoutOption) -> bool:
        return all(0 <= r.start < r.stop <= self.n_ranks and r.step == 1 for r in (option.ranks, option.holders))

    @cached_property
    def n_steady_steps(self) -> int:
        """Simulated steps that a step's time is the mean of; 0: that of the only one."""
        return n_steady_steps(self.n_steps, self.max_staleness)

    @cached_property
    def table(self) -> tuple[tuple[LayoutOption, ...], ...]:
        """Options of every MFC, in the order of ``graph.mfcs``."""
        return tuple(tuple(self.options[m.name]) for m in self.graph.mfcs)

    @cached_property
    def number(self) -> dict[str, int]:
        return {m.name: i for i, m in enumerate(self.graph.mfcs)}

    @cached_property
    def order(self) -> tuple[int, ...]:
        """Numbers of the MFCs in the order in which the master looks at them."""
        return tuple(self.number[m.name] for m in self.graph.topological)

    def home_mfc(self, role: str) -> int:
        """Return the MFC in whose layout a role's weights are at home."""
        mfc = self.graph.trainer(role) or next(m for m in self.graph.mfcs if m.role == role)
        return self.number[mfc.name]

    @cached_property
    def deps(self) -> tuple[MFCDeps, ...]:
        graph, data = self.graph, set(self.graph.dataset_keys)
        fetcher = next(self.number[m.name] for m in graph.topological if data & set(m.inputs))
        found = []
        for mfc in graph.mfcs:
            parents = tuple(self.number[p.name] for p in graph.parents(mfc))
            updater = graph.updater(mfc.role) if mfc.role else None
            found.append(
                MFCDeps(
                    parents,
                    (*parents, fetcher) if data & set(mfc.inputs) else parents,
                    updater=self.number[updater.name] if updater else -1,
                    allowed_staleness=mfc.allowed_staleness(self.max_staleness),
                    home_mfc=self.home_mfc(mfc.role) if mfc.role else -1,
                    offloaded=mfc.role in graph.offloaded,
                    batch_size=mfc.batch_size,
                )
            )
        return tuple(found)

    @cached_property
    def ema_syncs(self) -> tuple[EMASync, ...]:
        """Syncs that happen: those after an MFC that has a role."""
        syncs = (s for s in self.graph.syncs if self.graph[s.after].role)
        return tuple(EMASync(s, self.number[s.after], self.home_mfc(s.source), self.home_mfc(s.target)) for s in syncs)

    @cached_property
    def realloc_cost(self) -> Callable[[int, int, int], ReallocCost]:
        """``move`` by number of the MFC, asked once."""
        names = [m.name for m in self.graph.mfcs]
        return cache(lambda mfc, option, home: self.realloc(names[mfc], option, home))

    @cached_property
    def sync_cost(self) -> Callable[[int, int, int], Cost]:
        """``follow`` by number of the sync, asked once."""
        return cache(lambda number, source, target: self.sync(self.ema_syncs[number].sync, source, target))
