"""Plans for one experiment on one cluster: by rule or by search, with the time and memory that they will take."""

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, fields, replace
from functools import partial

from realhf.api.graph import MFC, Graph, Sync
from realhf.api.hardware import Cost
from realhf.api.layout import Layout
from realhf.api.plan import ExecutionPlan
from realhf.plan.candidates import Candidate, Candidates
from realhf.plan.evaluate import evaluate
from realhf.plan.heuristic import HEURISTICS, Cluster, Layouts
from realhf.plan.memory import Bytes
from realhf.plan.parts import shard_numels
from realhf.plan.prediction import Alternative, Prediction
from realhf.plan.problem import Choice, Move, Option, Problem
from realhf.plan.program import compile_program
from realhf.plan.schedule import RunLength
from realhf.plan.search import Result, search
from realhf.plan.simulate import simulate
from realhf.plan.strategies import layouts

STARTS = ("megatron", "symmetric", "real", "split")
N_STEPS = 3
"""Simulated steps: the first fills the pipeline of calls, the others are alike."""


@dataclass(frozen=True)
class Planner:
    """Everything that a plan depends on."""

    graph: Graph
    calls: Candidates
    n_workers: int
    max_staleness: int = 0
    per_mesh: int = 3
    effort: int = 40_000  # evaluations of a search

    @property
    def cluster(self) -> Cluster:
        return Cluster(self.n_workers, min(self.calls.hardware.node_size, self.n_workers))

    @property
    def cores(self) -> float:
        return self.calls.hardware.cores * max(1, self.n_workers // self.calls.hardware.node_size)

    def predict(self, plan: ExecutionPlan) -> Prediction:
        """Return the timeline and the memory of a plan."""
        n_steps = N_STEPS + self.max_staleness
        length = RunLength(self.calls.batch_size, n_steps * self.calls.batch_size, n_steps)
        program = compile_program(self.graph, plan)
        cost = self.calls.cost
        timeline = simulate(self.graph, plan, program, cost.price(plan), length, cost.workload, cost.speed.call,
                            self.cores, self.max_staleness)  # fmt: skip
        return Prediction(timeline, self._memory_of(plan))

    def by_rule(self, name: str) -> ExecutionPlan:
        """Return the plan of a heuristic."""
        return self.plan_of(self.rule(name))

    def plan_of(self, found: Layouts) -> ExecutionPlan:
        """Return the plan with these layouts and the micro-batching that suits each."""
        placements = {m.name: self.calls.of(m, found[m.name]).placement for m in self.graph.mfcs}
        return ExecutionPlan(self.n_workers, placements)

    def rule(self, name: str) -> Layouts:
        """Return the layouts of a heuristic; where all its calls do not fit together, each has to fit into less."""
        for share in (1.0, 0.75, 0.5, 0.35, 0.25, 0.15):
            fits = partial(self._fits, share=share)
            found = HEURISTICS[name](self.graph, self.calls.cost.models, self.cluster, fits)
            if self._fits(found):
                break
        return found

    def search(self, seed: int = 1, budget_s: float = 60.0, rules: Sequence[str] = STARTS) -> "Searched":
        """Return the best plan found, never worse than that of any rule."""
        started = [self.rule(name) for name in rules]
        table = self.candidates(started)
        problem = self.problem(table)
        starts = [self._choice(table, layouts_) for layouts_ in started]
        result = search(problem, starts, seed, self.effort, budget_s)
        return Searched(self._plan(table, result.choice), result, problem, table)

    def alternatives(self, plan: ExecutionPlan) -> tuple[float, dict[str, Alternative | None]]:
        """Return the seconds of a step, and for every call the best other layout that fits while the rest stays."""
        layouts_ = {m.name: plan[m.name].layout for m in self.graph.mfcs}
        table = self.candidates([layouts_])
        problem, choice = self.problem(table), self._choice(table, layouts_)
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

    def too_large(self, plan: ExecutionPlan, prediction: Prediction) -> str:
        """Say what a worker has too little memory for, and the smallest change that fits."""
        rank, worst = max(prediction.memory.items(), key=lambda item: item[1].total)
        parts = sorted(((v, f.name) for f, v in zip(fields(worst), astuple(worst), strict=True)), reverse=True)
        words = ", ".join(f"{name.replace('_', ' ')} {v / 1e9:.2f}" for v, name in parts if v >= 0.005 * worst.total)
        return (f"worker {rank} would need {worst.total / 1e9:.2f} GB ({words}), it has "
                f"{self.calls.hardware.memory / 1e9:.2f}; {self._remedy(plan)}")  # fmt: skip

    def _remedy(self, plan: ExecutionPlan) -> str:
        """Return the first of the changes, from the smallest to the largest, with which a plan fits."""
        for cap in (8192, 4096, 2048, 1024, 512):
            smaller = {name: replace(p, micro_batching=replace(
                           p.micro_batching, max_tokens_per_mb=min(cap, p.micro_batching.max_tokens_per_mb)))
                       for name, p in plan.placements.items()}  # fmt: skip
            if self._peak(replace(plan, placements=smaller)) <= self.calls.hardware.memory:
                return f"it fits with mb_spec.max_tokens_per_mb={cap} of every call"
        for slots in (128, 64, 32, 16, 8):
            fewer = {name: replace(p, micro_batching=replace(p.micro_batching, max_tokens_per_mb=1024, max_slots=slots))
                     for name, p in plan.placements.items()}  # fmt: skip
            if self._peak(replace(plan, placements=fewer)) <= self.calls.hardware.memory:
                return f"it fits with mb_spec.max_tokens_per_mb=1024 and {slots} answers at a time (gen.max_slots)"
        for name in HEURISTICS:
            other = self.by_rule(name)
            if self._peak(other) <= self.calls.hardware.memory:
                layouts_ = ",".join(f"{n}:{p.layout.strategy}" for n, p in other.placements.items())
                return f"allocation_mode={name} fits ({layouts_})"
        return "no heuristic fits either: take more workers, bf16 or gradient_checkpointing"

    def _memory_of(self, plan: ExecutionPlan) -> dict[int, Bytes]:
        rows = {m.name: self.calls.rows(m, plan[m.name].layout.strategy.dp) for m in self.graph.mfcs}
        return self.calls.memory.devices(plan, rows)

    def _peak(self, plan: ExecutionPlan) -> float:
        return max(some.total for some in self._memory_of(plan).values())

    def _plan(self, table: "Table", choice: Choice) -> ExecutionPlan:
        chosen = {m.name: table[m.name][i].placement for m, i in zip(self.graph.mfcs, choice, strict=True)}
        return ExecutionPlan(self.n_workers, chosen)

    def _choice(self, table: "Table", found: Layouts) -> Choice:
        return tuple(
            next(i for i, c in enumerate(table[m.name]) if c.placement.layout == found[m.name]) for m in self.graph.mfcs
        )

    def candidates(self, started: Sequence[Layouts]) -> "Table":
        """Return the layouts worth a look for every MFC: on each mesh the fastest, the leanest, and those of rules."""
        table: dict[str, list[Candidate]] = {}
        for mfc in self.graph.mfcs:
            config = self.calls.cost.models.get(mfc.role) if mfc.role else None
            wanted = {found[mfc.name] for found in started}
            by_mesh: dict[tuple[int, ...], list[Candidate]] = {}
            for layout in dict.fromkeys([*layouts(self.n_workers, self.cluster.node_size, config), *wanted]):
                by_mesh.setdefault(layout.mesh.ranks, []).append(self.calls.of(mfc, layout))
            table[mfc.name] = [c for some in by_mesh.values() for c in self._best(some, wanted)]
        return table

    def _best(self, some: list[Candidate], wanted: set[Layout]) -> list[Candidate]:
        fitting = [c for c in some if c.bytes <= self.calls.capacity] or some
        fastest = sorted(fitting, key=lambda c: c.cost.seconds)[: self.per_mesh]
        leanest = min(some, key=lambda c: (c.bytes, c.cost.seconds))
        kept = [*fastest, leanest, *(c for c in some if c.placement.layout in wanted)]
        return list({c.placement.layout: c for c in kept}.values())

    def problem(self, table: "Table") -> Problem:
        """Return the choice among candidates as plain numbers."""
        models, roles = self.calls.cost.models, self.calls.cost.roles
        options = {m.name: [self._option(m, c) for c in table[m.name]] for m in self.graph.mfcs}
        keepers = {r: (self.graph.trainer(r) or next(m for m in self.graph.mfcs if m.role == r)).name
                   for r in self.graph.roles}  # fmt: skip

        def move(mfc: str, option: int, at_home: int) -> Move:
            role = self.graph[mfc].role
            assert role is not None
            src, dst = table[keepers[role]][at_home].placement.layout, table[mfc][option].placement.layout
            if src == dst:
                return Move()
            numel = max(shard_numels(models[role], dst.strategy.tp, dst.strategy.pp))
            return Move(self.calls.cost.reallocate(role, src, dst), numel * (2 if roles[role].spec.bf16 else 4))

        def follow(sync: Sync, source: int, target: int) -> Cost:
            src, dst = (table[keepers[r]][i].placement.layout
                        for r, i in ((sync.source, source), (sync.target, target)))  # fmt: skip
            return self.calls.cost.reallocate(sync.source, src, dst, sync.eta)

        n_steps = N_STEPS + self.max_staleness
        return Problem(self.graph, options, self.n_workers, self.calls.batch_size, self.calls.capacity, move, follow,
                       self.max_staleness, self.calls.cost.speed.call, self.cores, n_steps)  # fmt: skip

    def _option(self, mfc: MFC, candidate: Candidate) -> Option:
        layout = candidate.placement.layout
        size = layout.strategy.world // layout.strategy.pp
        first, stop = layout.mesh.ranks[0], layout.mesh.ranks[-1] + 1
        keeps = mfc.role is not None
        rests = mfc.role in self.graph.offloaded
        copy = self.calls.cost.host_copy(mfc.role, layout) if mfc.role is not None and rests else Cost(0.0, 0.0)
        return Option(
            range(first, stop),
            range(stop - size, stop),
            candidate.cost,
            candidate.transfer,
            candidate.transient,
            self.calls.memory.resident(mfc.role or "", layout.strategy).total if keeps else 0.0,
            copy,
            copy,
        )

    def _fits(self, found: Layouts, share: float = 1.0) -> bool:
        """Tell whether some calls, and the models at home with them, fit a share of the devices' memory."""
        keepers: dict[str, str] = {}
        for mfc in self.graph.mfcs:
            if mfc.name in found and mfc.role and (mfc.is_train or mfc.role not in keepers):
                keepers[mfc.role] = mfc.name
        resident: dict[int, float] = {}
        peak: dict[int, float] = {}
        for name, layout in found.items():
            candidate = self.calls.of(self.graph[name], layout)
            keeps = name in keepers.values()
            for rank in layout.mesh.ranks:
                peak[rank] = max(peak.get(rank, 0.0), candidate.transient)
                resident[rank] = resident.get(rank, 0.0) + (candidate.resident if keeps else 0.0)
        return all(resident[rank] + some <= self.calls.capacity * share for rank, some in peak.items())


Table = Mapping[str, Sequence[Candidate]]


@dataclass(frozen=True)
class Searched:
    """The outcome of a search, and what it chose from."""

    plan: ExecutionPlan
    result: Result
    problem: Problem
    table: Table
