"""Simulation of a run with failures: the scheduler of the master, simulated workers, checkpoints and restarts.

The steps of a plan are simulated by groups of workers that take part in the same operations, with the durations of the
full simulation. Checkpoints are requested and committed at the points at which system/master.py does both.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from realhf.api.execution_plan import ExecutionPlan, Placement
from realhf.api.graph import Graph
from realhf.api.layout import DeviceMesh, Layout, ParallelStrategy
from realhf.api.machine import Cost, Workload
from realhf.plan.compile.schedule import Dispatch, FetchRows, FinishStep, MasterState
from realhf.plan.goodput import CheckpointTimes
from realhf.plan.search.event_sim import CallOps, Op, WorkerQueues
from realhf.plan.search.simulate import make_rows
from realhf.plan.search.timeline import Timeline
from realhf.plan.train_schedule import TrainSchedule

SHORT_ROWS = Workload(((1,),), (1,))
"""Lengths of the rows of simulated steps, whose durations are given."""


@dataclass(frozen=True)
class StepOps:
    """The operations of a step: for every call its workers and seconds, in order, where ``groups`` replace workers.

    ``groups[i]`` is the number of workers of group ``i``, all of which take part in the same operations.
    """

    calls: dict[str, tuple[tuple[tuple[int, ...], float], ...]]
    groups: tuple[int, ...]
    latency_s: float = 0.0  # from a worker to the master and back
    max_staleness: int = 0

    def group_of(self, worker: int) -> int | None:
        """Return the group of a worker, numbered by group; None for workers that take part in no operation."""
        for group, size in enumerate(self.groups):
            if worker < size:
                return group
            worker -= size
        return None


def step_ops(timeline: Timeline, latency_s: float = 0.0) -> StepOps:
    """Return the operations of a step in the steady state."""
    last = max(activity.step for activity in timeline.activities) - timeline.max_staleness
    activities = [activity for activity in timeline.activities if activity.step == last]
    taken = [list[int]() for _ in range(timeline.n_workers)]
    for number, activity in enumerate(activities):
        for rank in activity.ranks:
            taken[rank].append(number)
    sizes: dict[tuple[int, ...], int] = {}
    for numbers in map(tuple, taken):
        sizes[numbers] = sizes.get(numbers, 0) + bool(numbers)
    members = [numbers for numbers, size in sizes.items() if size]
    calls: dict[str, list[tuple[tuple[int, ...], float]]] = {}
    for number, activity in enumerate(activities):
        groups = tuple(group for group, numbers in enumerate(members) if number in numbers)
        calls.setdefault(activity.mfc, []).append((groups, activity.end - activity.start))
    ordered = {mfc: tuple(ops) for mfc, ops in calls.items()}
    return StepOps(ordered, tuple(sizes[numbers] for numbers in members), latency_s, timeline.max_staleness)


@dataclass(frozen=True)
class SimulatedPlan:
    """A plan on ``n_nodes`` nodes, with a checkpoint every ``cadence`` steps (None: none)."""

    n_nodes: int
    ops: StepOps
    cadence: int | None
    times: CheckpointTimes = CheckpointTimes(0.0, 0.0)


@dataclass(frozen=True)
class NodeFailure:
    """A node stops at a time in seconds."""

    at: float
    node: int


@dataclass(frozen=True)
class SlowPeriod:
    """A worker takes ``factor`` times as long from ``start`` to ``stop``."""

    start: float
    stop: float
    worker: int
    factor: float


@dataclass(frozen=True)
class RecoveryRule:
    """How a run continues after a failure.

    ``detect_s`` seconds after it the failure is known, and ``restart_s`` seconds after that the first step begins. A
    failed node is back after ``repair_s`` (0: a spare replaces it at once). A run waits for all nodes, or with
    ``is_elastic`` continues on the others; with ``regrows`` a restart also uses the nodes that are back.
    """

    detect_s: float
    restart_s: float
    repair_s: float = 0.0
    is_elastic: bool = False
    regrows: bool = False


@dataclass
class RunResult:
    """A run of ``seconds``: ``kept`` steps never have to be repeated, ``executed`` counts repeated ones as well."""

    seconds: float = 0.0
    kept: int = 0
    executed: int = 0
    launches: int = 0
    failures: int = 0  # of nodes that were in use
    down_s: float = 0.0
    resumed_at: list[int] = field(default_factory=list)  # the step from which every launch starts

    def share(self, step_s: float) -> float:
        """Return the share of the time that is spent on kept steps of ``step_s`` seconds."""
        return self.kept * step_s / self.seconds


@dataclass(frozen=True)
class Trace:
    """A launch in seconds from its begin: when each step ended, and when a checkpoint after how many steps counted.

    ``over_at`` is the end of the run, None if the launch did not reach it.
    """

    until: float
    step_ends: tuple[float, ...]
    checkpoints: tuple[tuple[float, int], ...]
    over_at: float | None

    def before(self, seconds: float) -> tuple[int, int]:
        """Return the number of steps that had ended, and of those in a complete checkpoint."""
        n_complete = bisect_right(self.checkpoints, (seconds, 1 << 62))
        return bisect_right(self.step_ends, seconds), self.checkpoints[n_complete - 1][1] if n_complete else 0


@dataclass
class FailureSimulator:
    """Simulates runs of one experiment; ``plan_for(n)`` is the plan on ``n`` nodes.

    A launch depends on its plan, and on its first step only by the distance to the next checkpoint. So launches whose
    course is known from a longer one are not simulated again.
    """

    graph: Graph
    plan_for: Callable[[int], SimulatedPlan]
    _traces: dict[tuple[int, int], Trace] = field(default_factory=dict)

    def run(
        self,
        rule: RecoveryRule,
        failures: Iterator[NodeFailure],
        n_nodes: int,
        n_steps: int,
        until: float,
        slow: Sequence[SlowPeriod] = (),
    ) -> RunResult:
        """Simulate a run of ``n_steps`` steps for at most ``until`` seconds.

        ``failures`` are infinitely many, in order; those of nodes that are not in use have no effect. A failure during
        a recovery makes it start again.
        """
        nodes, result, begin = _Nodes(rule, n_nodes), RunResult(), 0.0
        while True:
            failure = next(f for f in failures if f.at >= until or nodes.is_in_use(f))
            end = min(failure.at, until)
            if begin < end:
                result.launches += 1
                result.resumed_at.append(result.kept)
                trace = self._trace(len(nodes.in_use), result.kept, n_steps, begin, end, until, slow)
                executed, kept = trace.before(end - begin)
                result.executed += executed
                result.kept += kept
                if trace.over_at is not None and trace.over_at <= end - begin:
                    result.seconds, result.kept = begin + trace.over_at, n_steps
                    return result
            if end >= until:
                result.seconds = until
                result.down_s -= max(0.0, begin - until)
                return result
            result.failures += 1
            ready = nodes.fail(failure) + rule.restart_s
            result.down_s += ready - max(begin, failure.at)
            begin = ready

    def _trace(
        self,
        n_nodes: int,
        first_step: int,
        n_steps: int,
        begin: float,
        end: float,
        longest: float,
        slow: Sequence[SlowPeriod],
    ) -> Trace:
        plan, seconds = self.plan_for(n_nodes), end - begin
        key = n_nodes, first_step % plan.cadence if plan.cadence else 0
        known, some = self._traces.get(key), [s for s in slow if s.start < end and s.stop > begin]
        last = n_steps - 1 - plan.ops.max_staleness  # the last steps overlap with fewer calls
        if known and not some and known.until >= seconds and first_step + known.before(seconds)[0] < last:
            return known
        longer = (
            0.0 if some or known is None else min(2 * known.until, longest)
        )  # few launches are longer than all before
        trace = _Launch(self.graph, plan, first_step, n_steps, begin, some).run(max(seconds, longer))
        if not some and trace.over_at is None and (known is None or known.until < seconds):
            self._traces[key] = trace
        return trace


class _Nodes:
    """The nodes that a run uses, and those that are being repaired."""

    def __init__(self, rule: RecoveryRule, n_nodes: int) -> None:
        self.rule, self.n_nodes = rule, n_nodes
        self.in_use = set(range(n_nodes))
        self.back_at = [0.0] * n_nodes

    def is_in_use(self, failure: NodeFailure) -> bool:
        return failure.node in self.in_use and failure.at >= self.back_at[failure.node]

    def fail(self, failure: NodeFailure) -> float:
        """Record a failure; return when the run can be started again."""
        rule, known = self.rule, failure.at + self.rule.detect_s
        self.back_at[failure.node] = failure.at + rule.repair_s
        if rule.is_elastic:
            candidates = range(self.n_nodes) if rule.regrows else sorted(self.in_use)
            if left := {node for node in candidates if self.back_at[node] <= known}:
                self.in_use = left
                return known
        return max(known, *(self.back_at[node] for node in self.in_use))


class _Launch:
    """One launch: steps from a checkpoint until a failure or the end of the run."""

    def __init__(
        self, graph: Graph, plan: SimulatedPlan, first_step: int, n_steps: int, begin: float, slow: Sequence[SlowPeriod]
    ) -> None:
        self.plan, self.begin, self.first_step = plan, begin, first_step
        self.slow = [(period, plan.ops.group_of(period.worker)) for period in slow]
        graph = replace(graph, mfcs=tuple(replace(m, resamples=0, batch_size=1) for m in graph.mfcs), evaluation=())
        placement = Placement(Layout(DeviceMesh((0,)), ParallelStrategy()))
        self.graph, self.layouts = graph, ExecutionPlan(1, {m.name: placement for m in graph.mfcs})
        schedule = TrainSchedule(1, n_steps, n_steps, first_step)
        strict_step_order = plan.cadence is not None
        self.state = MasterState(graph, self.layouts, schedule, plan.ops.max_staleness, strict_step_order)
        n = len(plan.ops.groups)
        self.queues = WorkerQueues(2 * n, latency=plan.ops.latency_s)  # the second half: disks
        self.pending: int | None = None  # step of the checkpoint that is being written
        self.step_ends: list[float] = []
        self.checkpoints: list[tuple[float, int]] = []

    def run(self, seconds: float) -> Trace:
        """Run for ``seconds`` at most."""
        self.queues.run(self._perform(self.state.start()), self._on_finished, seconds)
        is_over = self.state.is_over and self.queues.now <= seconds
        over_at = self.queues.now if is_over else None
        return Trace(seconds, tuple(self.step_ends), tuple(self.checkpoints), over_at)

    def _on_finished(self, call: CallOps) -> Iterator[Sequence[CallOps]]:
        match call.tag:
            case Dispatch() as dispatch:
                yield from self._perform(self.state.handle(make_rows(self.graph, SHORT_ROWS, dispatch, self.layouts)))
            case int(step):  # the files of this checkpoint are complete
                self.checkpoints.append((self.queues.now, step - self.first_step))

    def _perform(self, actions: Sequence[FetchRows | Dispatch | FinishStep]) -> Iterator[Sequence[CallOps]]:
        calls = [action for action in actions if isinstance(action, Dispatch)]
        for action in actions:
            if isinstance(action, FinishStep):
                self.step_ends.append(self.queues.now)
                yield from self._checkpoint(action.span.step + 1)
        yield [self._call_ops(dispatch) for dispatch in calls]
        for action in actions:
            if isinstance(action, FetchRows):
                event = make_rows(self.graph, SHORT_ROWS, action, self.layouts)
                yield from self._perform(self.state.handle(event))

    def _checkpoint(self, step: int) -> Iterator[Sequence[CallOps]]:
        """Wait for the files of the last checkpoint, then start the next one if it is due."""
        groups, times = range(len(self.plan.ops.groups)), self.plan.times
        wait = lambda number: CallOps(number, [Op([g, len(groups) + g], Cost(0.0, 0.0)) for g in groups])
        if self.pending is not None:
            yield [wait(self.pending)]
            self.pending = None
        if self.plan.cadence is not None and (step % self.plan.cadence == 0 or self.state.is_over):
            copies = [Op([g, len(groups) + g], Cost(times.copy_s, 0.0)) for g in groups]
            writes = [Op([len(groups) + g], Cost(times.write_s, 0.0)) for g in groups]
            yield [CallOps(None, [*copies, *writes])]
            self.pending = step
        if self.state.is_over and self.pending is not None:
            yield [wait(self.pending)]

    def _call_ops(self, dispatch: Dispatch) -> CallOps:
        now = self.begin + self.queues.now
        slow = dict[int | None, float]()
        for period, group in self.slow:
            if period.start <= now < period.stop:
                slow[group] = max(period.factor, slow.get(group, 1.0))
        ops = []
        for groups, seconds in self.plan.ops.calls[dispatch.call.mfc]:
            factor = max((slow.get(group, 1.0) for group in groups), default=1.0)
            ops.append(Op(groups, Cost(seconds * factor, 0.0), dispatch))
        return CallOps(dispatch, ops)
