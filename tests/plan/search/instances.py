"""Random planning problems, with a layout for each option, so that choices can be simulated."""

from dataclasses import dataclass, replace
from itertools import count
from random import Random

from realhf.api.execution_plan import ExecutionPlan, Placement
from realhf.api.graph import MFC, Graph, InterfaceSpec, Kind, Sync, graph_problems
from realhf.api.layout import DeviceMesh, Layout, ParallelStrategy
from realhf.api.machine import Cost, Workload
from realhf.api.messages import PrepareCall
from realhf.api.program import Compute, Instruction, Load, Offload, Reallocate, Release, Transfer
from realhf.plan.search.problem import FREE, Choice, LayoutOption, Problem, ReallocCost
from realhf.plan.search.simulate import simulate
from realhf.plan.search.timeline import Timeline
from realhf.plan.train_schedule import TrainSchedule


@dataclass(frozen=True)
class Instance:
    """A problem, and the layout of each option."""

    problem: Problem
    layouts: dict[str, tuple[Layout, ...]]

    def simulate(self, choice: Choice) -> Timeline:
        """Simulate the master on a choice, with the costs in the problem's tables."""
        p = self.problem
        assignment = {m.name: i for m, i in zip(p.graph.mfcs, choice, strict=True)}
        plan = ExecutionPlan(p.n_ranks, {name: Placement(self.layouts[name][i]) for name, i in assignment.items()})
        sampled = any(m.kind is Kind.GENERATE for m in p.graph.mfcs)
        workload = Workload(((3,), (5,), (4,)), (2, 6), 2) if sampled else Workload(((3, 4), (5,), (4, 1, 7)))
        schedule = TrainSchedule(p.batch_size, p.batch_size * p.n_steps, p.n_steps)

        numbers = {m.name: count() for m in p.graph.mfcs}

        def price(call: PrepareCall, instruction: Instruction) -> Cost:
            if isinstance(instruction, Compute):
                costs = p.options[call.mfc][assignment[call.mfc]].compute
                return costs[next(numbers[call.mfc]) % len(costs)]
            return price_of(p, assignment, call.mfc, instruction)

        return simulate(p.graph, plan, price, schedule, workload, p.call_seconds, p.cores, p.max_staleness)


def price_of(p: Problem, assignment: dict[str, int], mfc: str, instruction: Instruction) -> Cost:
    def home(role: str) -> str:
        return p.graph.mfcs[p.home_mfc(role)].name

    option = p.options[mfc][assignment[mfc]]
    match instruction:
        case Transfer():
            return option.transfer
        case Release():
            return FREE
        case Load(role):
            return p.options[home(role)][assignment[home(role)]].load
        case Offload(role):
            return p.options[home(role)][assignment[home(role)]].offload
        case Reallocate(role, _, target) if role == target:
            return p.realloc(mfc, assignment[mfc], assignment[home(role)]).cost
        case Reallocate(role, _, target):
            sync = next(s for s in p.graph.syncs if (s.after, s.source, s.target) == (mfc, role, target))
            return p.sync(sync, assignment[home(role)], assignment[home(target)])


def random_instance(
    seed: int, n_mfcs: int | None = None, n_options: int = 4, n_ranks: int = 4, tight: bool = False
) -> Instance:
    """Return a random problem, in which every holder of rows holds some rows of each call that reads them.

    With ``tight`` memory, usually only some choices fit.
    """
    random = Random(seed)
    batch, n_steps, staleness = random.randint(1, 6), random.randint(1, 4), random.choice((0, 0, 1, 2))
    graph = random_graph(random, n_mfcs or random.randint(1, 5), batch)
    shared = random.random() < 0.3
    cores = random.uniform(0.5, n_ranks) if shared else 0.0
    whole = not shared and random.random() < 0.3  # integers make many events coincide

    def cost(by: Random = random) -> Cost:
        seconds = float(by.randint(0, 4)) if whole else by.choice((0.0, by.uniform(0, 4)))
        return Cost(seconds, seconds * by.uniform(0, 3))

    layouts = {m.name: tuple(_layouts(random, m, graph, batch, n_ranks, n_options)) for m in graph.mfcs}
    options = {
        name: tuple(
            LayoutOption(
                range(min(x.mesh.ranks), max(x.mesh.ranks) + 1),
                range(min(x.dp_heads()), max(x.dp_heads()) + 1),
                tuple(cost() for _ in range(random.choice((1, 1, 2, 3)))),
                cost(),
                random.uniform(0, 4),
                random.uniform(0, 4),
                cost(),
                cost(),
            )
            for x in some
        )
        for name, some in layouts.items()
    }
    homes: dict[str, str] = {}

    def realloc(mfc: str, option: int, home: int) -> ReallocCost:
        if layouts[mfc][option] == layouts[homes[mfc]][home]:
            return ReallocCost()
        by = Random(f"{seed} {mfc} {option} {home}")
        return ReallocCost(cost(by), by.uniform(0, 3), by.uniform(0, 2))

    def sync_cost(sync: Sync, source: int, target: int) -> Cost:
        return cost(Random(f"{seed} {sync} {source} {target}"))

    capacity = random.uniform(4, 12) if tight else 1e9
    latency = random.choice((0.0, 0.1))
    problem = Problem(graph, options, n_ranks, batch, capacity, realloc, sync_cost, staleness, latency, cores, n_steps)
    homes.update({m.name: graph.mfcs[problem.home_mfc(m.role)].name for m in graph.mfcs if m.role})
    return Instance(problem, layouts)


def random_graph(random: Random, n_mfcs: int, batch: int) -> Graph:
    """Return MFCs that read keys of earlier ones, one key for every pair, or dataset keys."""
    parents = {i: [p for p in range(i) if random.random() < 0.5] for i in range(n_mfcs)}
    roles = [random.choice((None, "a", "b", "c")) for _ in range(n_mfcs)]
    mfcs: list[MFC] = []
    for i, role in enumerate(roles):
        kinds = [Kind.INFERENCE]
        if role is not None:
            trained = any(m.role == role and m.is_train for m in mfcs)
            kinds += [Kind.GENERATE, *([] if trained else [Kind.TRAIN] * 2)]
        data = not parents[i] or random.random() < 0.3
        inputs = (*(f"{p}to{i}" for p in parents[i]), *([f"data{i}"] if data else []))
        outputs = tuple(f"{i}to{c}" for c in range(n_mfcs) if i in parents[c])
        size = random.choice((batch, batch, random.randint(1, batch)))
        mfcs.append(MFC(f"m{i}", role, random.choice(kinds), InterfaceSpec("any"), inputs, outputs, size))
    mfcs = _with_filter(random, mfcs)
    names = {m.role for m in mfcs if m.role}
    trainers = {m.role: m.name for m in mfcs if m.is_train}
    syncs = [
        Sync(after, str(source), target, 0.5)
        for source, after in trainers.items()
        for target in sorted(names - set(trainers))
        if random.random() < 0.5
    ]
    offloaded = tuple(sorted(r for r in names if random.random() < 0.2))
    return Graph(tuple(mfcs), tuple(syncs[:1]), offloaded)


def _with_filter(random: Random, mfcs: list[MFC]) -> list[MFC]:
    """Let a random MFC filter rows, if all training calls then read filtered rows."""
    number = random.randrange(len(mfcs))
    filtered = [replace(m, resamples=2) if i == number and m.outputs else m for i, m in enumerate(mfcs)]
    return filtered if random.random() < 0.8 and not graph_problems(tuple(filtered)) else mfcs


def _layouts(random: Random, mfc: MFC, graph: Graph, batch: int, n_ranks: int, n_options: int) -> list[Layout]:
    fewest = min(mfc.batch_size, batch % mfc.batch_size or mfc.batch_size)
    readers = [m for m in graph.mfcs if set(m.inputs) & set(mfc.outputs)]
    if mfc == graph.fetcher:
        others = [m for m in graph.mfcs if m != mfc and set(graph.dataset_keys) & set(m.inputs)]
        fewest = fewest if all(m.batch_size == batch for m in others) else 1
    most = fewest if all(m.batch_size % mfc.batch_size == 0 for m in readers) else 1
    found = []
    for _ in range(random.randint(1, n_options)):
        dp = random.randint(1, min(most, n_ranks))
        pp = random.randint(1, n_ranks // dp)
        first = random.randint(0, n_ranks - dp * pp)
        found.append(Layout(DeviceMesh(tuple(range(first, first + dp * pp))), ParallelStrategy(dp=dp, pp=pp)))
    return found
