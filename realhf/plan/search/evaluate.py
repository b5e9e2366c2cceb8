"""Evaluation of a choice of options: seconds per step and peak memory of a worker, bit for bit as in csrc/planner."""

from collections.abc import Sequence
from functools import lru_cache
from itertools import count

from realhf.api.machine import Cost
from realhf.plan.compile.forwarding import choose_courier
from realhf.plan.compile.schedule import Decision, FetchRows, Scheduler, StartCall
from realhf.plan.search.event_sim import CallOps, Op, WorkerQueues
from realhf.plan.search.mcmc import Chain, run_chain
from realhf.plan.search.problem import Choice, Problem, ReallocCost
from realhf.plan.search.simulate import run_calls
from realhf.plan.train_schedule import TrainSchedule

OOM_PENALTY = 1e12
"""Objective in seconds of a plan that needs exactly the available memory; larger than the time of any feasible plan."""


class PythonEvaluator:
    """Evaluates choices with the scheduler of the master on simulated workers, and runs Markov chains over them."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        size = problem.batch_size
        # without resamples, whose expected number is unknown
        self._schedule = TrainSchedule(size, size * problem.n_steps, problem.n_steps)
        self.evaluate = lru_cache(1 << 16)(self._evaluate)

    def run_chain(self, chain: Chain, n: int, temperature: float) -> None:
        """Make ``n`` proposals; see ``mcmc.run_chain``."""
        n_options = [len(options) for options in self.problem.table]
        run_chain(lambda choice: objective(self.problem, *self.evaluate(choice)), n_options, chain, n, temperature)

    def _evaluate(self, choice: Choice) -> tuple[float, float]:
        """Return seconds per step in the steady state, and the peak memory of a worker in bytes."""
        problem = self.problem
        assignment = Assignment(problem, choice)
        ops = {m.name: assignment.call_ops(i) for i, m in enumerate(problem.graph.mfcs)}
        numbers = {m.name: count() for m in problem.graph.mfcs}

        def make_ops(call: StartCall) -> CallOps:
            number = next(numbers[call.mfc])
            return CallOps(call, [Op(ranks, costs[number % len(costs)]) for ranks, costs in ops[call.mfc]])

        def on_finished(action: FetchRows | StartCall) -> Sequence[Decision]:
            return scheduler.advance(action.mfc if isinstance(action, StartCall) else None, action.span)

        queues = WorkerQueues(assignment.n_rank_classes, problem.cores, problem.call_seconds)
        scheduler = Scheduler(problem.graph, self._schedule, problem.max_staleness)
        _, ends = run_calls(queues, scheduler.fetch_ahead(), on_finished, make_ops)
        (first, last), n = problem.steady_steps, problem.n_steady_steps
        return (ends[last] - ends[first]) / n if n else ends[0], peak_bytes(assignment)


def objective(problem: Problem, seconds: float, peak: float) -> float:
    """Return what a search minimizes: seconds if the plan fits, else a penalty proportional to the memory it needs."""
    return seconds if peak <= problem.capacity else OOM_PENALTY * (peak / problem.capacity)


class Assignment:
    """The options of a choice. Ranks that belong to the same options form a *rank class*, simulated as one worker."""

    def __init__(self, problem: Problem, choice: Choice) -> None:
        self.problem, self.choice = problem, choice
        self.options = [some[i] for some, i in zip(problem.table, choice, strict=True)]
        bounds = {b for option in self.options for r in (option.ranks, option.holders) for b in (r.start, r.stop)}
        self._starts = sorted(bounds)[:-1]
        self.n_rank_classes = len(self._starts)

    def rank_classes(self, *ranges: range) -> list[int]:
        """Return the rank classes in any of the ranges, ascending."""
        return [i for i, start in enumerate(self._starts) if any(start in ranks for ranks in ranges)]

    def realloc_cost(self, mfc: int) -> ReallocCost | None:
        """Return the cost of reallocating weights to an MFC; None if it is the home MFC or has no role."""
        home = self.problem.deps[mfc].home_mfc
        return None if home in (-1, mfc) else self.problem.realloc_cost(mfc, self.choice[mfc], self.choice[home])

    def _senders(self, mfc: int, source: int) -> range:
        """Return the ranks that send rows of a source to an MFC: its holders, or a courier's (``choose_courier``)."""
        classes = lambda number: frozenset(self.rank_classes(self.options[number].ranks))
        available = [(number, classes(number)) for number in self.problem.deps[mfc].couriers.get(source, ())]
        courier = choose_courier(available, classes(mfc), classes(source))
        return self.options[source].holders if courier is None else self.options[courier].ranks

    def call_ops(self, mfc: int) -> list[tuple[list[int], tuple[Cost, ...]]]:
        """Return rank classes and costs of each operation of a call (plan/compile/program.py), row transfer first.

        The costs are by the number of the call, cyclically.
        """
        problem, option, deps = self.problem, self.options[mfc], self.problem.deps[mfc]
        holders = (self._senders(mfc, source) for source in deps.row_sources)
        ops = [(self.rank_classes(option.ranks), option.compute)]
        if realloc := self.realloc_cost(mfc):
            ops.insert(0, (self.rank_classes(self.options[deps.home_mfc].ranks, option.ranks), (realloc.cost,)))
        for number, sync in enumerate(problem.ema_syncs):
            if sync.after == mfc:
                ranks = self.rank_classes(*(self.options[home].ranks for home in (sync.source, sync.target)))
                ops.append((ranks, (problem.sync_cost(number, self.choice[sync.source], self.choice[sync.target]),)))
        if deps.offloaded:
            home = self.options[deps.home_mfc]
            ranks = self.rank_classes(home.ranks)
            ops = [(ranks, (home.load,)), *ops, (ranks, (home.offload,))]
        return [(self.rank_classes(option.ranks, *holders), (option.transfer,)), *ops]


def peak_bytes(assignment: Assignment) -> float:
    """Return the peak memory of a worker: resident weights, ring buffers, and the call that needs most."""
    resident, transient, rings = ([0.0] * assignment.n_rank_classes for _ in range(3))
    for mfc, (option, deps) in enumerate(zip(assignment.options, assignment.problem.deps, strict=True)):
        needed = [0.0] * assignment.n_rank_classes
        realloc = assignment.realloc_cost(mfc)
        for rank in assignment.rank_classes(option.ranks):
            needed[rank] = option.transient + (realloc.nbytes if realloc else 0.0)
        if realloc:
            for rank in assignment.rank_classes(assignment.options[deps.home_mfc].ranks, option.ranks):
                rings[rank] = max(rings[rank], realloc.rings)
        if deps.offloaded:
            home = assignment.options[deps.home_mfc]
            for rank in assignment.rank_classes(home.ranks):
                needed[rank] += home.resident
        elif deps.home_mfc == mfc:
            for rank in assignment.rank_classes(option.ranks):
                resident[rank] += option.resident
        transient = [max(pair) for pair in zip(transient, needed, strict=True)]
    return max(map(sum, zip(resident, transient, rings, strict=True)), default=0.0)
