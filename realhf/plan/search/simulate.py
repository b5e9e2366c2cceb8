"""Simulation of a run without devices: the scheduler of the master, workers with given costs, and a simulated clock."""

from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import TypeVar, cast

from realhf.api.batch_meta import PROMPT, BatchMeta, ColumnMeta, RowId
from realhf.api.execution_plan import ExecutionPlan
from realhf.api.graph import Graph, Kind
from realhf.api.machine import Cost, Workload
from realhf.api.messages import PrepareCall
from realhf.api.program import Instruction, Program, Transfer
from realhf.plan.compile.program import compile_program, instruction_ranks
from realhf.plan.compile.schedule import Dispatch, FetchRows, FinishStep, MasterState, RowsReady
from realhf.plan.search.event_sim import CallOps, Op, WorkerQueues
from realhf.plan.search.timeline import Activity, Timeline
from realhf.plan.train_schedule import TrainSchedule

Call = TypeVar("Call")
Price = Callable[[PrepareCall, Instruction], Cost]
DTYPES = {"tokens": "int64", "prompts": "int64"}  # element types of columns other than float32


def simulate(
    graph: Graph,
    plan: ExecutionPlan,
    price: Price,
    schedule: TrainSchedule,
    workload: Workload,
    call_seconds: float = 0.0,
    cores: float = 0.0,
    max_staleness: int = 0,
) -> Timeline:
    """Return the timeline of a run in which every instruction costs ``price(call, instruction)``.

    ``call_seconds`` and ``cores`` are the latency and the shared cores of ``WorkerQueues``. Reading data takes no time.
    """
    state, program = MasterState(graph, plan, schedule, max_staleness), compile_program(graph, plan)
    calls, step_ends = run_calls(
        WorkerQueues(plan.n_workers, cores, call_seconds),
        state.start(),
        lambda action: state.handle(make_rows(graph, workload, action, plan)),
        lambda dispatch: _call_ops(program, price, dispatch),
    )
    assert state.is_over, "no call is in flight, but the run is not over"
    return Timeline(plan.n_workers, _activities(calls), step_ends, max_staleness)


def run_calls(
    queues: WorkerQueues,
    actions: Sequence[FetchRows | Call | FinishStep],
    on_finished: Callable[[FetchRows | Call], Sequence[FetchRows | Call | FinishStep]],
    make_ops: Callable[[Call], CallOps],
) -> tuple[list[CallOps], tuple[float, ...]]:
    """Perform actions of a scheduler on simulated workers; return all calls, and the time at which each step ends.

    ``on_finished`` returns the actions after a fetch, which takes no time, or a call.
    """
    calls: list[CallOps] = []
    step_ends: list[float] = []

    def perform(actions: Sequence[FetchRows | Call | FinishStep]) -> Iterator[Sequence[CallOps]]:
        batch = [make_ops(action) for action in actions if not isinstance(action, FetchRows | FinishStep)]
        calls.extend(batch)
        yield batch
        for action in actions:
            if isinstance(action, FinishStep):
                step_ends.append(queues.now)
            elif isinstance(action, FetchRows):
                yield from perform(on_finished(action))

    queues.run(perform(actions), lambda call: perform(on_finished(cast(Call, call.tag))))
    return calls, tuple(step_ends)


def make_rows(graph: Graph, workload: Workload, action: FetchRows | Dispatch, plan: ExecutionPlan) -> RowsReady:
    """Return the event that follows an action, with row lengths from the workload.

    A generation call produces the samples of its prompts, any other call one output per input row. Rows are stored on
    the data-parallel heads. All columns have the length of the row.
    """
    if isinstance(action, FetchRows):
        heads, outputs = plan[graph.fetcher.name].layout.dp_heads(), {}
        prompts, n = range(action.span.start, action.span.stop), len(heads)
        for k, head in enumerate(heads):
            own = prompts[len(prompts) * k // n : len(prompts) * (k + 1) // n]
            outputs[head] = _meta([*chain.from_iterable(map(workload.dataset_rows, own))], graph.dataset_keys)
        return RowsReady(None, action.span, outputs)
    call, mfc = action.call, graph[action.call.mfc]
    outputs = {}
    for head, part in zip(plan[mfc.name].layout.dp_heads(), call.assignment, strict=True):
        ids = [call.inputs.ids[i] for i in part]
        if mfc.kind is Kind.GENERATE:
            drawn = {p: workload.sampled_rows(p) for p in sorted({i.prompt for i in ids})}
            rows = [*chain.from_iterable(drawn.values())]
            if mfc.per_prompt:
                rows = [(RowId(p, PROMPT), sampled[0][1]) for p, sampled in drawn.items()]
        else:
            lengths = [max(c.lengths[i] for c in call.inputs.columns.values()) for i in part]
            rows = list(zip(ids, lengths, strict=True))
        outputs[head] = _meta(rows, mfc.outputs)
    return RowsReady(mfc.name, action.span, outputs if mfc.outputs else {})


def _meta(rows: Sequence[tuple[RowId, int]], keys: Sequence[str]) -> BatchMeta:
    lengths = tuple(n for _, n in rows)
    return BatchMeta(tuple(i for i, _ in rows), {k: ColumnMeta(DTYPES.get(k, "float32"), lengths) for k in keys})


def _call_ops(program: Program, price: Price, dispatch: Dispatch) -> CallOps:
    ops = []
    for instruction in program[dispatch.call.mfc]:
        holders = dispatch.call.holders.ranks if isinstance(instruction, Transfer) else ()
        ranks = instruction_ranks(instruction).union(holders)
        ops.append(Op(sorted(ranks), price(dispatch.call, instruction), instruction))
    return CallOps(dispatch, ops)


def _activities(calls: Sequence[CallOps]) -> tuple[Activity, ...]:
    ops = sorted((op for call in calls for op in call.ops), key=lambda op: (op.start, op.end))
    number = {op: i for i, op in enumerate(ops)}
    activities = []
    for op in ops:
        dispatch, instruction = op.call.tag, op.tag
        assert isinstance(dispatch, Dispatch) and isinstance(instruction, Instruction)
        after = None if op.predecessor is None else number[op.predecessor]
        call = dispatch.call
        activities.append(Activity(call.mfc, call.step, instruction, tuple(op.ranks), op.start, op.end, after))
    return tuple(activities)
