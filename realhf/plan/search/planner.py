"""Plans for one experiment on one cluster: by rule or by search, with the time and memory that they will take."""

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

from realhf.api.execution_plan import ExecutionPlan
from realhf.api.graph import MFC, Graph, Sync
from realhf.api.layout import Layout
from realhf.api.machine import Cost
from realhf.plan.compile.heuristic import HEURISTICS, Cluster, Layouts
from realhf.plan.compile.program import compile_program
from realhf.plan.compile.schedule import TrainSchedule
from realhf.plan.compile.strategies import layouts
from realhf.plan.cost.memory import Bytes
from realhf.plan.search.candidates import Candidate, Candidates
from realhf.plan.search.evaluate import evaluate
from realhf.plan.search.prediction import Alternative, Prediction
from realhf.plan.search.problem import Choice, LayoutOption, Problem, ReallocCost
from realhf.plan.search.search import SearchResult, search
from realhf.plan.search.simulate import simulate

N_STEPS = 3
"""Simulated steps: the first fills the pipeline of calls, the others are alike."""
SHARES = (1.0, 0.75, 0.5, 0.35, 0.25, 0.15)
"""Of a worker's memory, for each call: the first with which all calls fit together."""
CLOSE = 1.1
"""Rules within this factor of the best choice are compared with it by prediction: a search knows moves roughly."""


@dataclass(frozen=True)
class Planner:
    """Everything that a plan depends on."""

    graph: Graph
    calls: Candidates
    n_workers: int
    max_staleness: int = 0
    per_mesh: int = 3
    max_evaluations: int = 40_000  # evaluations of a search

    @property
    def cluster(self) -> Cluster:
        return Cluster(self.n_workers, min(self.calls.hardware.node_size, self.n_workers))

    @property
    def cores(self) -> float:
        return self.calls.hardware.cores * max(1, self.n_workers // self.calls.hardware.node_size)

    def predict(self, plan: ExecutionPlan) -> Prediction:
        """Return the timeline and the memory of a plan."""
        n_steps = N_STEPS + self.max_staleness
        length = TrainSchedule(self.calls.batch_size, n_steps * self.calls.batch_size, n_steps)
        program = compile_program(self.graph, plan)
        cost = self.calls.cost
        timeline = simulate(self.graph, plan, program, cost.price(plan), length, cost.workload, cost.speed.call,
                            self.cores, self.max_staleness)  # fmt: skip
        return Prediction(timeline, self._memory_of(plan))

    def by_heuristic(self, name: str) -> ExecutionPlan:
        """Return the plan of a heuristic; where its calls do not fit together, each has to fit into less."""
        for share in SHARES:
            fits = partial(self._fits, share=share)
            found = HEURISTICS[name](self.graph, self.calls.cost.models, self.cluster, fits)
            plan = self._plan_of(found, share)
            if self.fits(plan):
                break
        return plan

    def search(
        self, seed: int = 1, budget_s: float = 60.0, heuristics: Sequence[str] = tuple(HEURISTICS)
    ) -> "PlannedSearch":
        """Return the best plan found, never worse than that of any rule; no choice is looked at after ``budget_s``."""
        deadline = time.monotonic() + budget_s
        ruled: list[ExecutionPlan] = []
        for name in heuristics:
            with suppress(ValueError):  # a profile need not know what a rule wants
                ruled.append(self.by_heuristic(name))
        started = [plan_layouts(plan) for plan in ruled]
        for share in SHARES[::2]:
            table = self.candidates(started, share)
            problem = self.problem(table)
            starts, left = [find_choice(table, some) for some in started], deadline - time.monotonic()
            result = search(problem, starts, seed, self.max_evaluations, left)
            if result.fits:
                break
        chosen = {m.name: table[m.name][i].placement for m, i in zip(self.graph.mfcs, result.choice, strict=True)}
        found = PlannedSearch(ExecutionPlan(self.n_workers, chosen), result, problem, table)
        return replace(found, plan=self._best(found, ruled))

    def _best(self, found: "PlannedSearch", ruled: Sequence[ExecutionPlan]) -> ExecutionPlan:
        """Return the plan that was found; of plans that are about as good, the one with the best prediction."""
        fitting: list[tuple[float, ExecutionPlan]] = []
        for plan in [found.plan, *ruled]:
            if all(plan != other for _, other in fitting) and self.fits(plan):
                seconds = found.result.seconds if plan is found.plan else self._seconds(found, plan)
                fitting.append((seconds, plan))
        if not fitting:
            return found.plan
        best = min(seconds for seconds, _ in fitting)
        close = [plan for seconds, plan in fitting if seconds <= CLOSE * best]
        return close[0] if len(close) == 1 else min(close, key=lambda plan: self.predict(plan).seconds)

    def _seconds(self, found: "PlannedSearch", plan: ExecutionPlan) -> float:
        """Return what a rule's plan takes: as the search reckons, unless its micro-batches are others."""
        choice = find_choice(found.table, plan_layouts(plan))
        looked_at = (found.table[m.name][i].placement for m, i in zip(self.graph.mfcs, choice, strict=True))
        if all(placement == plan[m.name] for m, placement in zip(self.graph.mfcs, looked_at, strict=True)):
            return evaluate(found.problem, choice)[0]
        return self.predict(plan).seconds

    def alternatives(self, plan: ExecutionPlan) -> tuple[float, dict[str, Alternative | None]]:
        """Return the seconds of a step, and for every call the best other layout that fits while the rest stays."""
        table = self.candidates([plan_layouts(plan)])
        problem, choice = self.problem(table), find_choice(table, plan_layouts(plan))
        found: dict[str, Alternative | None] = {}
        for i, mfc in enumerate(self.graph.mfcs):
            others = []
            for option, candidate in enumerate(table[mfc.name]):
                if option != choice[i]:
                    seconds, peak = evaluate(problem, (*choice[:i], option, *choice[i + 1 :]))
                    if peak <= self.calls.capacity:
                        others.append(Alternative(candidate.placement.layout, seconds))
            found[mfc.name] = min(others, key=lambda a: a.seconds, default=None)
        return evaluate(problem, choice)[0], found

    def fits(self, plan: ExecutionPlan) -> bool:
        """Tell whether every worker has enough memory for a plan."""
        return max(some.total for some in self._memory_of(plan).values()) <= self.calls.hardware.usable

    def _memory_of(self, plan: ExecutionPlan) -> dict[int, Bytes]:
        rows = {m.name: self.calls.rows(m, plan[m.name].layout.strategy.dp) for m in self.graph.mfcs}
        return self.calls.memory.devices(plan, rows)

    def _plan_of(self, found: Layouts, share: float) -> ExecutionPlan:
        """Return the plan with these layouts and the micro-batching that suits each."""
        placements = {m.name: self.calls.of(m, found[m.name], share).placement for m in self.graph.mfcs}
        return ExecutionPlan(self.n_workers, placements)

    def _fits(self, found: Layouts, share: float) -> bool:
        """Tell whether calls are known and fit: all together, or each alone a share where some have no layout yet."""
        try:
            if len(found) == len(self.graph.mfcs):
                return self.fits(self._plan_of(found, share))
            alone = (self.calls.of(self.graph[name], layout, share) for name, layout in found.items())
            return all(candidate.bytes <= share * self.calls.capacity for candidate in alone)
        except ValueError:
            return False

    def candidates(self, started: Sequence[Layouts], share: float = 1.0) -> "Table":
        """Return the layouts worth a look for every MFC: on each mesh the fastest, the leanest, and those of rules."""
        table: dict[str, list[Candidate]] = {}
        for mfc in self.graph.mfcs:
            config = self.calls.cost.models.get(mfc.role) if mfc.role else None
            wanted = {found[mfc.name] for found in started}
            by_mesh: dict[tuple[int, ...], list[Candidate]] = {}
            for layout in dict.fromkeys([*layouts(self.n_workers, self.cluster.node_size, config), *wanted]):
                with suppress(ValueError):  # a profile need not know all of them
                    by_mesh.setdefault(layout.mesh.ranks, []).append(self.calls.of(mfc, layout, share))
            table[mfc.name] = [c for some in by_mesh.values() for c in self._worth(some, wanted, share)]
        return table

    def _worth(self, some: list[Candidate], wanted: set[Layout], share: float) -> list[Candidate]:
        fitting = [c for c in some if c.bytes <= share * self.calls.capacity] or some
        fastest = sorted(fitting, key=lambda c: c.cost.seconds)[: self.per_mesh]
        leanest = min(some, key=lambda c: (c.bytes, c.cost.seconds))
        kept = [*fastest, leanest, *(c for c in some if c.placement.layout in wanted)]
        return list({c.placement.layout: c for c in kept}.values())

    def problem(self, table: "Table") -> Problem:
        """Return the choice among candidates as plain numbers."""
        options = {m.name: [self._option(m, c) for c in table[m.name]] for m in self.graph.mfcs}
        keepers = {r: (self.graph.trainer(r) or next(m for m in self.graph.mfcs if m.role == r)).name
                   for r in self.graph.roles}  # fmt: skip

        def move(mfc: str, option: int, at_home: int) -> ReallocCost:
            role = self.graph[mfc].role
            assert role is not None
            src, dst = table[keepers[role]][at_home].placement.layout, table[mfc][option].placement.layout
            if src == dst:
                return ReallocCost()
            memory = self.calls.memory
            cost, copy = self.calls.cost.reallocate(role, src, dst), memory.weights(role, dst.strategy)
            return ReallocCost(cost, copy, memory.rings(role, src, dst))

        def follow(sync: Sync, source: int, target: int) -> Cost:
            src, dst = (table[keepers[r]][i].placement.layout
                        for r, i in ((sync.source, source), (sync.target, target)))  # fmt: skip
            return self.calls.cost.reallocate(sync.source, src, dst, sync.eta)

        n_steps = N_STEPS + self.max_staleness
        return Problem(self.graph, options, self.n_workers, self.calls.batch_size, self.calls.capacity, move, follow,
                       self.max_staleness, self.calls.cost.speed.call, self.cores, n_steps)  # fmt: skip

    def _option(self, mfc: MFC, candidate: Candidate) -> LayoutOption:
        """Return a candidate in numbers. A mesh with gaps counts as the whole span of its workers."""
        layout = candidate.placement.layout
        ranks = layout.mesh.ranks
        last = ranks[-layout.strategy.dp * layout.strategy.tp :]
        rests = mfc.role in self.graph.offloaded
        copy = self.calls.cost.host_copy(mfc.role, layout) if mfc.role is not None and rests else Cost(0.0, 0.0)
        return LayoutOption(
            range(min(ranks), max(ranks) + 1),
            range(min(last), max(last) + 1),
            candidate.cost,
            candidate.transfer,
            candidate.transient,
            candidate.resident,
            copy,
            copy,
        )


Table = Mapping[str, Sequence[Candidate]]


def plan_layouts(plan: ExecutionPlan) -> Layouts:
    return {name: placement.layout for name, placement in plan.placements.items()}


def find_choice(table: Table, found: Layouts) -> Choice:
    """Return where layouts stand in a table, which has them."""
    return tuple(
        next(i for i, candidate in enumerate(some) if candidate.placement.layout == found[mfc])
        for mfc, some in table.items()
    )


@dataclass(frozen=True)
class PlannedSearch:
    """The outcome of a search, and what it chose from."""

    plan: ExecutionPlan
    result: SearchResult
    problem: Problem
    table: Table
