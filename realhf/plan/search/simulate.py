"""A run without devices: the master's own machine, workers that take as long as they are said to take, and a clock."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from realhf.api.batch_meta import PROMPT, BatchMeta, ColumnMeta, RowId
from realhf.api.execution_plan import ExecutionPlan
from realhf.api.graph import MFC, Graph, Kind
from realhf.api.machine import Cost, Workload
from realhf.api.messages import PrepareCall
from realhf.api.program import Compute, Instruction, Load, Offload, Program, Reallocate, Release, Transfer
from realhf.plan.compile.schedule import (
    Action,
    Dispatch,
    FetchRows,
    FinishStep,
    MasterState,
    PromptRange,
    RowsReady,
    TrainSchedule,
)
from realhf.plan.search.event_sim import Batches, CallOps, Op, WorkerQueues
from realhf.plan.search.timeline import Activity, Timeline

Price = Callable[[PrepareCall, Instruction], Cost]
DTYPES = {"tokens": "int64", "prompts": "int64"}
"""Element types of columns that are not float32."""


def simulate(
    graph: Graph,
    plan: ExecutionPlan,
    program: Program,
    price: Price,
    length: TrainSchedule,
    workload: Workload,
    call_seconds: float = 0.0,
    cores: float = 0.0,
    max_staleness: int = 0,
) -> Timeline:
    """Return the timeline of a run in which every instruction costs ``price(call, instruction)``.

    ``call_seconds`` pass between the end of a call's last instruction and the next calls. ``cores`` are those of all
    nodes together, shared by all workers; 0 where every worker has a device of its own. Reading data takes no time.
    """
    inboxes = WorkerQueues(plan.n_workers, cores, call_seconds)
    state = MasterState(graph, plan, length, max_staleness)
    master = _SimulatedMaster(state, program, price, workload, lambda: inboxes.now)
    inboxes.run(master.start(), master.answer)
    assert state.is_over, "nothing is under way, and the run is not over"
    return Timeline(plan.n_workers, _activities(master.orders), tuple(master.step_ends), max_staleness)


def make_rows(graph: Graph, workload: Workload, action: FetchRows | Dispatch, plan: ExecutionPlan) -> RowsReady:
    """Return the event that answers an action, with rows as the workload has them.

    A generating call makes the rows that are drawn for its prompts, any other has outputs for its input rows; they lie
    at its data-parallel heads. Every column counts as long as its row.
    """
    if isinstance(action, FetchRows):
        fetcher = next(m for m in graph.topological if set(graph.dataset_keys) & set(m.inputs))
        heads, found = plan[fetcher.name].layout.dp_heads(), {}
        for k, head in enumerate(heads):
            start, stop = (_cut(action.span, i, len(heads)) for i in (k, k + 1))
            found[head] = _meta([row for p in range(start, stop) for row in workload.fetched(p)], graph.dataset_keys)
        return RowsReady(None, action.span, found)
    call, mfc = action.call, graph[action.call.mfc]
    outputs = {}
    for head, part in zip(plan[mfc.name].layout.dp_heads(), call.assignment, strict=True):
        ids = [call.inputs.ids[i] for i in part]
        if mfc.kind is Kind.GENERATE:
            rows = [row for p in sorted({i.prompt for i in ids}) for row in sampled_rows(mfc, workload, p)]
        else:
            lengths = [max(c.lengths[i] for c in call.inputs.columns.values()) for i in part]
            rows = list(zip(ids, lengths, strict=True))
        outputs[head] = _meta(rows, mfc.outputs)
    return RowsReady(mfc.name, action.span, outputs if mfc.outputs else {})


def sampled_rows(mfc: MFC, workload: Workload, prompt: int) -> Sequence[tuple[RowId, int]]:
    """Return the rows that a generating call makes for a prompt, with their lengths."""
    drawn = workload.drawn(prompt)
    return [(RowId(prompt, PROMPT), drawn[0][1])] if mfc.per_prompt else drawn


def _cut(span: PromptRange, k: int, n: int) -> int:
    return span.start + (span.stop - span.start) * k // n


def _meta(rows: Sequence[tuple[RowId, int]], keys: Sequence[str]) -> BatchMeta:
    lengths = tuple(n for _, n in rows)
    return BatchMeta(tuple(i for i, _ in rows), {k: ColumnMeta(DTYPES.get(k, "float32"), lengths) for k in keys})


@dataclass
class _SimulatedMaster:
    """What the master does with events: fetches are answered at once, calls become orders."""

    state: MasterState
    program: Program
    price: Price
    workload: Workload
    now: Callable[[], float]
    orders: list[CallOps] = field(default_factory=list)
    step_ends: list[float] = field(default_factory=list)

    def start(self) -> Batches:
        return self._perform(self.state.start())

    def answer(self, order: CallOps) -> Batches:
        assert isinstance(order.tag, Dispatch)
        return self._perform(self.state.handle(self._made(order.tag)))

    def _made(self, action: FetchRows | Dispatch) -> RowsReady:
        return make_rows(self.state.graph, self.workload, action, self.state.plan)

    def _perform(self, actions: Sequence[Action]) -> Iterator[Sequence[CallOps]]:
        batch = [self._order(action) for action in actions if isinstance(action, Dispatch)]
        self.orders += batch
        yield batch
        for action in actions:
            match action:
                case FinishStep():
                    self.step_ends.append(self.now())
                case FetchRows():
                    yield from self._perform(self.state.handle(self._made(action)))

    def _order(self, dispatch: Dispatch) -> CallOps:
        first: list[Op] = []
        rest: list[Op] = []
        for instruction in self.program[dispatch.call.mfc]:
            ranks = sorted(participants(dispatch.call, instruction))
            job = Op(ranks, self.price(dispatch.call, instruction), instruction)
            (first if isinstance(instruction, Transfer) else rest).append(job)
        return CallOps(dispatch, first, rest)


def participants(call: PrepareCall, instruction: Instruction) -> frozenset[int]:
    """Return the workers that carry out an instruction of a call together."""
    match instruction:
        case Transfer(_, layout):
            return call.holders.ranks | frozenset(layout.mesh.ranks)
        case Reallocate(_, src, _, dst):
            return frozenset((*src.mesh.ranks, *dst.mesh.ranks))
        case Compute(_, _, layout) | Load(_, layout) | Offload(_, layout) | Release(_, layout):
            return frozenset(layout.mesh.ranks)


def _activities(orders: Sequence[CallOps]) -> tuple[Activity, ...]:
    """Return the jobs of all orders as values, in order of their starts."""
    jobs = sorted((job for order in orders for job in order.ops), key=lambda job: (job.start, job.end))
    number = {job: i for i, job in enumerate(jobs)}
    found = []
    for job in jobs:
        dispatch, instruction = job.call.tag, job.tag
        assert isinstance(dispatch, Dispatch) and isinstance(instruction, Instruction)
        after = None if job.predecessor is None else number[job.predecessor]
        call = dispatch.call
        found.append(Activity(call.mfc, call.step, instruction, tuple(job.ranks), job.start, job.end, after))
    return tuple(found)
