"""Plans for one experiment on one cluster, by heuristic or by search, with predicted time and memory."""

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import product
from math import inf
from operator import itemgetter

from realhf.api.execution_plan import ExecutionPlan, Placement
from realhf.api.graph import MFC, Graph, Sync
from realhf.api.layout import Layout
from realhf.api.machine import Cost
from realhf.plan.compile.call_degrees import chunk_layouts, expert_layouts
from realhf.plan.compile.check import layouts
from realhf.plan.compile.heuristic import HEURISTICS, Cluster, Layouts
from realhf.plan.compile.program import home_mfc
from realhf.plan.compile.zero import with_zero3, zero3_layouts
from realhf.plan.cost.memory import Bytes
from realhf.plan.search.call_costs import CallCosts
from realhf.plan.search.candidates import Candidate, Candidates
from realhf.plan.search.cpp_evaluator import evaluator
from realhf.plan.search.problem import FREE, Choice, LayoutOption, Problem, ReallocCost
from realhf.plan.search.search import SearchResult, search
from realhf.plan.search.simulate import simulate
from realhf.plan.search.timeline import Alternative, Prediction
from realhf.plan.train_schedule import TrainSchedule

N_STEPS = 3  # simulated steps: the first one fills the pipeline of calls, the others are alike
N_STEPS_AHEAD = 2  # further ones per step of staleness: rollouts ahead of the first steps, and none after the last
MEMORY_SHARES = (1.0, 0.75, 0.5, 0.35, 0.25, 0.15)
"""Fractions of a worker's memory available to each call; the first one with which all calls fit together is used."""
N_SIMULATED = 12
"""Simulated plans of a search, in addition to those of heuristics: its tables approximate transfers of rows."""
N_SIMULATED_MOVES = 1024
"""Simulated changes of one call's layout after a search, times the number of workers."""
CLOSE = 1.02  # relative cost of a call's layouts that such changes try
SMALL_CLUSTER = 8  # workers for which a search considers all layouts
N_ALTERNATIVES = 3  # simulated layouts of a call, of which the best is the alternative
Table = Mapping[str, Sequence[Candidate]]  # the candidates of every MFC


@dataclass(frozen=True)
class PlannedSearch:
    """The best plan, its simulation, and the search over tables, whose seconds are approximations."""

    plan: ExecutionPlan
    prediction: Prediction
    result: SearchResult
    problem: Problem
    table: Table

    @property
    def seconds(self) -> float:
        """Seconds per step, as ``Planner.predict`` returns them."""
        return self.prediction.seconds


@dataclass(frozen=True)
class Planner:
    """Makes and predicts plans. A search of a large cluster considers the ``per_mesh`` fastest layouts on each mesh."""

    graph: Graph
    calls: Candidates
    n_workers: int
    max_staleness: int = 0
    per_mesh: int = 3
    max_evaluations: int = 40_000

    @property
    def cluster(self) -> Cluster:
        return Cluster(self.n_workers, min(self.calls.hardware.node_size, self.n_workers))

    @property
    def cores(self) -> float:
        return self.calls.hardware.cores * max(1, self.n_workers // self.calls.hardware.node_size)

    def predict(self, plan: ExecutionPlan) -> Prediction:
        cost = self.calls.cost
        timeline = simulate(self.graph, plan, cost.price(plan), self._schedule, cost.workload, cost.speed.call,
                            self.cores, self.max_staleness)  # fmt: skip
        return Prediction(timeline, self._memory_of(plan))

    @property
    def _schedule(self) -> TrainSchedule:
        n_steps = N_STEPS + N_STEPS_AHEAD * self.max_staleness
        return TrainSchedule(self.calls.batch_size, n_steps * self.calls.batch_size, n_steps)

    @cached_property
    def _call_costs(self) -> CallCosts:
        return CallCosts(self.calls.cost, self._schedule)

    def by_heuristic(self, name: str) -> ExecutionPlan:
        """Return the plan of a heuristic; if its calls do not fit together, each must fit in a smaller share."""
        for share in MEMORY_SHARES:
            fits = partial(self._fits, share=share)
            plan = self._plan_of(HEURISTICS[name](self.graph, self.calls.cost.models, self.cluster, fits), share)
            if self.fits(plan):
                break
        return plan

    def search(self, seed: int = 1, budget_s: float = 60.0, starts: Sequence[ExecutionPlan] = ()) -> PlannedSearch:
        """Return the best plan found within ``budget_s`` seconds.

        It is never slower than a heuristic plan or one of ``starts`` that fits: these and the best plans of a search
        over tables are simulated, and the fastest is returned. ``starts`` may be plans for fewer workers.
        """
        deadline = time.monotonic() + budget_s
        plans = [*self.enlarged(starts), *self._heuristic_plans()]
        chosen, begin = [plan_layouts(plan) for plan in plans], time.monotonic()
        simulated = self._simulate(plans)
        reserved_s = N_SIMULATED / max(1, len(simulated)) * (time.monotonic() - begin)
        for share in MEMORY_SHARES[::2]:
            table = self.candidates(chosen, share)
            problem, time_left = self.problem(table), deadline - time.monotonic() - reserved_s
            choices = [find_choice(table, plan) for plan in plans]
            result = search(problem, choices, seed, self.max_evaluations, time_left)
            if result.fits:
                break
        best = self.plan_of_choice(table, result.choice)
        found = [self.plan_of_choice(table, choice) for choice in result.leaders[:N_SIMULATED]]
        known = [plan for plan, _ in simulated]
        simulated += self._simulate([plan for plan in found if plan not in known], deadline)
        if not simulated:
            return PlannedSearch(best, self.predict(best), result, problem, table)
        best, prediction = min(simulated, key=lambda pair: pair[1].seconds)
        best, prediction = self._improve(best, prediction, table, deadline)
        return PlannedSearch(best, prediction, result, problem, table)

    def _improve(
        self, plan: ExecutionPlan, prediction: Prediction, table: Table, deadline: float
    ) -> tuple[ExecutionPlan, Prediction]:
        """Return the plan after changes of one call's layout that make the simulation faster.

        Tables cannot tell layouts apart that differ in transfers of rows alone. Layouts of a call whose costs are close
        to the fastest are tried, on small clusters, where a simulation is fast.
        """
        n_left = N_SIMULATED_MOVES // self.n_workers
        for mfc in self.graph.mfcs:
            fastest = min(candidate.cost.seconds for candidate in table[mfc.name])
            for candidate in sorted(table[mfc.name], key=lambda candidate: candidate.cost.seconds):
                if n_left <= 0 or candidate.cost.seconds > CLOSE * fastest or time.monotonic() > deadline:
                    break
                changed = replace(plan, placements={**plan.placements, mfc.name: candidate.placement})
                if changed == plan or not self.fits(changed):
                    continue
                n_left -= 1
                if (found := self.predict(changed)).seconds < prediction.seconds:
                    plan, prediction = changed, found
        return plan, prediction

    def enlarged(self, plans: Sequence[ExecutionPlan]) -> list[ExecutionPlan]:
        """Return plans for fewer workers as plans for all, without those that a profile cannot predict."""
        found: list[ExecutionPlan] = []
        for plan in plans:
            with suppress(ValueError):
                larger = replace(plan, n_workers=self.n_workers)
                self.predict(larger)
                found.append(larger)
        return found

    def _heuristic_plans(self) -> list[ExecutionPlan]:
        plans: list[ExecutionPlan] = []
        for name in HEURISTICS:
            with suppress(ValueError):  # a profile may lack what a heuristic asks for
                plans.append(self.by_heuristic(name))
        return plans

    def _simulate(
        self, plans: Sequence[ExecutionPlan], deadline: float = inf
    ) -> list[tuple[ExecutionPlan, Prediction]]:
        """Return the predictions of the plans that fit; after the deadline, only that of the first."""
        distinct = [plan for i, plan in enumerate(plans) if plan not in plans[:i]]
        found: list[tuple[ExecutionPlan, Prediction]] = []
        for plan in filter(self.fits, distinct):
            with suppress(ValueError):  # a profile may lack links
                found.append((plan, self.predict(plan)))
            if time.monotonic() > deadline:
                break
        return found

    def plan_of_choice(self, table: Table, choice: Choice) -> ExecutionPlan:
        placements = {m.name: table[m.name][i].placement for m, i in zip(self.graph.mfcs, choice, strict=True)}
        return ExecutionPlan(self.n_workers, placements)

    def alternatives(self, plan: ExecutionPlan) -> tuple[float, dict[str, Alternative | None]]:
        """Return the seconds of a step, and for every call the best other layout that fits if the rest is unchanged."""
        table = self.candidates([plan_layouts(plan)])
        problem, choice = self.problem(table), find_choice(table, plan)
        plans = evaluator(problem)
        best: dict[str, Alternative | None] = {}
        for i, mfc in enumerate(self.graph.mfcs):
            others = []
            for option, candidate in enumerate(table[mfc.name]):
                if option != choice[i]:
                    seconds, peak = plans.evaluate((*choice[:i], option, *choice[i + 1 :]))
                    if peak <= self.calls.capacity:
                        others.append((seconds, option, candidate.placement))
            fastest = [placement for _, _, placement in sorted(others, key=itemgetter(0))[:N_ALTERNATIVES]]
            changed = [replace(plan, placements={**plan.placements, mfc.name: placement}) for placement in fastest]
            found = [Alternative(p, self.predict(new).seconds) for p, new in zip(fastest, changed, strict=True)]
            best[mfc.name] = min(found, key=lambda a: a.seconds, default=None)
        return self.predict(plan).seconds, best

    def with_savings(self, plan: ExecutionPlan) -> ExecutionPlan:
        """Return a plan with given layouts in which training calls save memory in the fastest way that fits together.

        If nothing fits, it is the way with the smallest peak. Calls that have a saving keep it.
        """
        free = [mfc for mfc in self.graph.mfcs if plan[mfc.name].saving is None]
        if not (trainers := [mfc for mfc in free if self.calls.savings(mfc) != [None]]):
            return plan
        ways: list[tuple[float, ExecutionPlan]] = []
        for savings in product(*map(self.calls.savings, trainers)):
            chosen, seconds = dict(plan.placements), 0.0
            for mfc, saving in zip(trainers, savings, strict=True):
                chosen[mfc.name] = replace(plan[mfc.name], saving=saving)
                rows = self.calls.rows(mfc, plan[mfc.name].layout.strategy.dp)
                seconds += self.calls.cost.compute(mfc, chosen[mfc.name], rows).seconds
            ways.append((seconds, replace(plan, placements=chosen)))
        by_time = [way for _, way in sorted(ways, key=lambda way: way[0])]
        return next(filter(self.fits, by_time), min(by_time, key=self._peak))

    def fits(self, plan: ExecutionPlan) -> bool:
        """Return True if every worker has enough memory for a plan."""
        return self._peak(plan) <= self.calls.hardware.usable

    def _peak(self, plan: ExecutionPlan) -> float:
        return max(some.total for some in self._memory_of(plan).values())

    def _memory_of(self, plan: ExecutionPlan) -> dict[int, Bytes]:
        rows = {m.name: self.calls.rows(m, plan[m.name].layout.strategy.dp) for m in self.graph.mfcs}
        return self.calls.memory.devices(plan, rows)

    def with_zero3(self, plan: ExecutionPlan) -> ExecutionPlan:
        """Return a plan of given layouts with ZeRO-3 in those calls that have it by the options of their roles."""
        return with_zero3(plan, self.graph, self.calls.cost.roles)

    def _candidate(self, mfc: MFC, layout: Layout, share: float) -> Candidate:
        """Return a call's candidate in a layout, with ZeRO-3 if the role requests it or leaves it and it is better."""
        some = [self.calls.of(mfc, one, share) for one in zero3_layouts(mfc, layout, self.calls.cost.roles)]
        available = share * self.calls.capacity
        return min(some, key=lambda c: (c.bytes > available, c.cost.seconds if c.bytes <= available else c.bytes))

    def _plan_of(self, chosen: Layouts, share: float) -> ExecutionPlan:
        placements = {m.name: self._candidate(m, chosen[m.name], share).placement for m in self.graph.mfcs}
        return ExecutionPlan(self.n_workers, placements)

    def _fits(self, chosen: Layouts, share: float) -> bool:
        """Return True if all calls fit together, or, while some have no layout yet, each fits in a share of memory."""
        try:
            if len(chosen) == len(self.graph.mfcs):
                return self.fits(self._plan_of(chosen, share))
            alone = (self._candidate(self.graph[name], layout, share) for name, layout in chosen.items())
            return all(candidate.bytes <= share * self.calls.capacity for candidate in alone)
        except ValueError:  # the profile lacks a layout
            return False

    def candidates(self, starts: Sequence[Layouts], share: float = 1.0) -> Table:
        """Return the candidates of every MFC: on each mesh the fastest, the smallest, and those in ``starts``."""
        table: dict[str, list[Candidate]] = {}
        for mfc in self.graph.mfcs:
            config = self.calls.cost.models.get(mfc.role) if mfc.role else None
            required = {start[mfc.name] for start in starts}
            by_mesh: dict[tuple[int, ...], dict[Layout, Candidate]] = {}
            roles, node_size = self.calls.cost.roles, self.cluster.node_size
            possible = (one for layout in layouts(self.n_workers, node_size, config)
                        for found in zero3_layouts(mfc, layout, roles)
                        for one in expert_layouts(mfc, found, config, roles.get(mfc.role or ""), node_size)
                        if mfc.name not in self.calls.served or one.strategy.pp == one.strategy.ep == 1)  # fmt: skip
            for ways in [*(chunk_layouts(mfc, layout, config) for layout in possible), *([one] for one in required)]:
                if (fastest := self._fastest(mfc, ways, share)) is not None:
                    by_mesh.setdefault(ways[0].mesh.ranks, {})[fastest.placement.layout] = fastest
            chosen = [c for some in by_mesh.values() for c in self._select(mfc, [*some.values()], required, share)]
            table[mfc.name] = [v for c in chosen for v in self.calls.variants(mfc, c.placement.layout, share)]
        return table

    def _fastest(self, mfc: MFC, layouts: Sequence[Layout], share: float) -> Candidate | None:
        """Return the fastest candidate, if possible one that fits; None if a profile lacks all of them."""
        found, available = list[Candidate](), share * self.calls.capacity
        for layout in layouts:
            with suppress(ValueError):
                found.append(self.calls.of(mfc, layout, share))
        return min(found, key=lambda c: (c.bytes > available, c.cost.seconds), default=None)

    def _select(self, mfc: MFC, some: list[Candidate], required: set[Layout], share: float) -> list[Candidate]:
        least = lambda c: self.calls.variants(mfc, c.placement.layout, share)[-1].bytes
        fitting = [c for c in some if c.bytes <= share * self.calls.capacity] or some
        n_fastest = len(fitting) if self.n_workers <= SMALL_CLUSTER else self.per_mesh
        fastest = sorted(fitting, key=lambda c: c.cost.seconds)[:n_fastest]
        smallest = min(some, key=lambda c: (least(c), c.cost.seconds))
        selected = [*fastest, smallest, *(c for c in some if c.placement.layout in required)]
        return list({c.placement.layout: c for c in selected}.values())

    def problem(self, table: Table) -> Problem:
        """Return the choice among candidates as a table of costs."""
        options = {m.name: [self._option(m, c) for c in table[m.name]] for m in self.graph.mfcs}

        def home_layout(role: str, option: int) -> Layout:
            return table[home_mfc(self.graph, role).name][option].placement.layout

        def realloc(mfc: str, option: int, home: int) -> ReallocCost:
            role = self.graph[mfc].role
            assert role is not None
            src, dst = home_layout(role, home), table[mfc][option].placement.layout
            if src == dst:
                return ReallocCost()
            memory = self.calls.memory
            copy = memory.weights(role, dst.strategy) + memory.base(role, dst.strategy)
            cost = self.calls.cost.reallocate(role, src, dst)
            return ReallocCost(cost, copy, memory.ring_bytes(role, src, dst))

        def sync(ema: Sync, source: int, target: int) -> Cost:
            src, dst = home_layout(ema.source, source), home_layout(ema.target, target)
            return self.calls.cost.reallocate(ema.source, src, dst, ema.eta)

        return Problem(self.graph, options, self.n_workers, self.calls.batch_size, self.calls.capacity, realloc, sync,
                       self.max_staleness, self.calls.cost.speed.call, self.cores, self._schedule.n_steps)  # fmt: skip

    def _option(self, mfc: MFC, candidate: Candidate) -> LayoutOption:
        """Return a candidate in numbers. A mesh with gaps counts as the full range of its workers."""
        layout = candidate.placement.layout
        ranks = layout.mesh.ranks
        last = ranks[-layout.strategy.dp * layout.strategy.tp :]
        copy = FREE
        if mfc.role is not None and mfc.role in self.graph.offloaded:
            copy = self.calls.cost.host_copy(mfc.role, layout)
        used, holders = (range(min(some), max(some) + 1) for some in (ranks, last))
        costs = self._call_costs.of(mfc, candidate.placement, self.calls.key(mfc, layout))
        transfer = self.calls.transfer(mfc, layout) if self.n_workers > 1 else FREE
        return LayoutOption(used, holders, costs, transfer, candidate.transient, candidate.resident, copy, copy)


def plan_layouts(plan: ExecutionPlan) -> Layouts:
    return {name: placement.layout for name, placement in plan.placements.items()}


def find_choice(table: Table, plan: ExecutionPlan) -> Choice:
    """Return the option numbers of a plan's layouts, which are in the table; if possible with its memory saving."""

    def number(some: Sequence[Candidate], placement: Placement) -> int:
        same = [i for i, candidate in enumerate(some) if candidate.placement.layout == placement.layout]
        return next((i for i in same if some[i].placement.saving == placement.saving), same[0])

    return tuple(number(some, plan[mfc]) for mfc, some in table.items())
