"""What a choice of options comes to: seconds of a step, and bytes of the fullest worker.

``csrc/planner/evaluate.cpp`` finds the same, bit for bit.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from realhf.api.machine import Cost
from realhf.plan.search.event_sim import Batches, CallOps, Op, WorkerQueues
from realhf.plan.search.problem import FREE, Choice, LayoutOption, Problem, ReallocCost

OOM_PENALTY = 1e12
"""Seconds that a plan is said to take when it exceeds memory by nothing; no plan that fits takes as long."""
UNPLACED = LayoutOption(range(0), range(0), FREE)


def evaluate(problem: Problem, choice: Choice) -> tuple[float, float]:
    """Return seconds per step when the run has settled, and the bytes of the fullest worker."""
    chosen = Assignment(problem, choice)
    inboxes = WorkerQueues(chosen.n_rank_classes, problem.cores, problem.call_seconds)
    master = _CountingMaster(problem, [_jobs(chosen, mfc) for mfc in range(len(choice))], lambda: inboxes.now)
    inboxes.run(master.start(), master.answer)
    ends, n = master.step_ends, problem.n_steady_steps
    return (ends[n] - ends[0]) / n if n else ends[0], peak_bytes(chosen)


def objective(problem: Problem, seconds: float, peak: float) -> float:
    """Return what search makes small: seconds of a plan that fits; more for any that does not, by how much it lacks."""
    return seconds if peak <= problem.capacity else OOM_PENALTY * (peak / problem.capacity)


class Assignment:
    """What a choice comes to; None stands for an MFC that has no option yet, and takes nothing.

    Ranks that no option tells apart are one *atom*: one worker to the simulation.
    """

    def __init__(self, problem: Problem, choice: Sequence[int | None]) -> None:
        self.problem, self.choice = problem, choice
        self.options = [UNPLACED if i is None else some[i] for some, i in zip(problem.table, choice, strict=True)]
        bounds = {b for option in self.options for r in (option.ranks, option.holders) for b in (r.start, r.stop)}
        self._starts = sorted(bounds)[:-1]

    @property
    def n_rank_classes(self) -> int:
        return len(self._starts)

    def rank_classes(self, *ranges: range) -> list[int]:
        """Return the atoms in any of the ranges, ascending."""
        return [i for i, start in enumerate(self._starts) if any(start in ranks for ranks in ranges)]

    def ranks(self, mfc: int) -> range:
        return self.options[mfc].ranks

    def realloc_cost(self, mfc: int) -> ReallocCost | None:
        """Return what brings an MFC its weights; None where they are there."""
        keeper = self.problem.deps[mfc].home_mfc
        if keeper in (-1, mfc):
            return None
        option, home = self.choice[mfc], self.choice[keeper]
        return ReallocCost() if option is None or home is None else self.problem.realloc_cost(mfc, option, home)

    def sync_cost(self, number: int) -> Cost:
        """Return what a sync costs."""
        sync = self.problem.ema_syncs[number]
        source, target = self.choice[sync.source], self.choice[sync.target]
        return FREE if source is None or target is None else self.problem.sync_cost(number, source, target)


def _jobs(chosen: Assignment, mfc: int) -> tuple[Op, list[Op]]:
    """Return what a call asks of the workers: plan/compile/program.py in numbers."""
    problem, option, wire = chosen.problem, chosen.options[mfc], chosen.problem.deps[mfc]
    holders = (chosen.options[source].holders for source in wire.row_sources)
    transfer = Op(chosen.rank_classes(option.ranks, *holders), option.transfer)
    work = [Op(chosen.rank_classes(option.ranks), option.compute)]
    if move := chosen.realloc_cost(mfc):
        work.insert(0, Op(chosen.rank_classes(chosen.ranks(wire.home_mfc), option.ranks), move.cost))
    for number, sync in enumerate(problem.ema_syncs):
        if sync.after == mfc:
            work.append(
                Op(chosen.rank_classes(chosen.ranks(sync.source), chosen.ranks(sync.target)), chosen.sync_cost(number))
            )
    if wire.offloaded:
        home = chosen.options[wire.home_mfc]
        where = chosen.rank_classes(home.ranks)
        work = [Op(where, home.load), *work, Op(where, home.offload)]
    return transfer, work


def peak_bytes(chosen: Assignment) -> float:
    """Return the most bytes of a worker: what is at home there, rings, and the call that needs most on top."""
    resident, transient, rings = ([0.0] * chosen.n_rank_classes for _ in range(3))
    for mfc, (option, wire) in enumerate(zip(chosen.options, chosen.problem.deps, strict=True)):
        needed = [0.0] * chosen.n_rank_classes
        move = chosen.realloc_cost(mfc)
        for atom in chosen.rank_classes(option.ranks):
            needed[atom] = option.transient + (move.nbytes if move else 0.0)
        if move:
            for atom in chosen.rank_classes(chosen.ranks(wire.home_mfc), option.ranks):
                rings[atom] = max(rings[atom], move.rings)
        if wire.offloaded:
            home = chosen.options[wire.home_mfc]
            for atom in chosen.rank_classes(home.ranks):
                needed[atom] += home.resident
        elif wire.home_mfc == mfc:
            for atom in chosen.rank_classes(option.ranks):
                resident[atom] += option.resident
        transient = [max(pair) for pair in zip(transient, needed, strict=True)]
    return max(map(sum, zip(resident, transient, rings, strict=True)), default=0.0)


@dataclass
class _CountingMaster:
    """``MasterState`` for steps of equal size, in which only the numbers of prompts matter."""

    problem: Problem
    work: Sequence[tuple[Op, Sequence[Op]]]
    now: Callable[[], float]
    step_ends: list[float] = field(default_factory=list)
    fetched: int = 0  # steps

    def __post_init__(self) -> None:
        n = len(self.work)
        self.next, self.done, self.running = [0] * n, [0] * n, [False] * n

    def start(self) -> Batches:
        return self._fetch_ahead()

    def answer(self, order: CallOps) -> Batches:
        assert isinstance(order.tag, int)
        mfc = order.tag
        self.running[mfc] = False
        self.done[mfc] = self.next[mfc]
        size = self.problem.batch_size
        while len(self.step_ends) < self.problem.n_steps and min(self.done) >= (len(self.step_ends) + 1) * size:
            self.step_ends.append(self.now())
        yield self._issue()
        yield from self._fetch_ahead()

    def _fetch_ahead(self) -> Iterator[list[CallOps]]:
        while self.fetched < min(self.problem.n_steps, len(self.step_ends) + 2 + self.problem.max_staleness):
            self.fetched += 1
            yield self._issue()

    def _issue(self) -> list[CallOps]:
        return [self._order(mfc) for mfc in self.problem.order if self._is_ready(mfc)]

    def _is_ready(self, mfc: int) -> bool:
        wire, size = self.problem.deps[mfc], self.problem.batch_size
        position = self.next[mfc]
        step = position // size
        if self.running[mfc] or step >= self.fetched:
            return False
        if wire.updater >= 0 and self.done[wire.updater] < (step - wire.allowed_staleness) * size:
            return False
        stop = min(position + wire.batch_size, (step + 1) * size)
        return all(self.done[parent] >= stop for parent in wire.parents)

    def _order(self, mfc: int) -> CallOps:
        step = self.next[mfc] // self.problem.batch_size
        self.next[mfc] = min(self.next[mfc] + self.problem.deps[mfc].batch_size, (step + 1) * self.problem.batch_size)
        self.running[mfc] = True
        transfer, rest = self.work[mfc]
        return CallOps(mfc, [Op(transfer.ranks, transfer.cost)], [Op(job.ranks, job.cost) for job in rest])
