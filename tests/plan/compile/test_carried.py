"""Rows that a generating call passes to its next step: where they are, and after a checkpoint."""

from dataclasses import replace

from realhf.api.batch_meta import PROMPT, BatchMeta, ColumnMeta, RowId
from realhf.api.execution_plan import ExecutionPlan, Placement
from realhf.api.graph import MFC, Graph, InterfaceSpec, Kind
from realhf.api.layout import DeviceMesh, Layout, ParallelStrategy
from realhf.plan.compile.schedule import Dispatch, MasterState, RowsReady
from realhf.plan.train_schedule import PromptRange, TrainSchedule

SPEC = InterfaceSpec("any")
GEN = MFC("gen", "actor", Kind.GENERATE, SPEC, ("prompts",), ("tokens",), 2, carried=("carried",))
TRAIN = MFC("train", "actor", Kind.TRAIN, SPEC, ("tokens",), (), 2)
GRAPH = Graph((GEN, TRAIN))
PLAN = ExecutionPlan(2, {name: Placement(Layout(DeviceMesh((0, 1)), ParallelStrategy(2))) for name in ("gen", "train")})
SCHEDULE = TrainSchedule(2, 5, 3)  # the last step has one prompt


def rows(key: str, start: int, stop: int, sample: int, length: int = 3) -> BatchMeta:
    ids = tuple(RowId(prompt, sample) for prompt in range(start, stop))
    return BatchMeta(ids, {key: ColumnMeta("uint8", (length,) * len(ids))})


def play(state: MasterState, first: int) -> list[Dispatch]:
    """Run the steps from ``first``; return the generating calls. Prompt 2 * step + i is generated on worker i."""
    calls = []
    state.start()
    for step in range(first, SCHEDULE.n_steps):
        span = SCHEDULE.span(step)
        actions = state.handle(RowsReady(None, span, {0: rows("prompts", span.start, span.stop, PROMPT)}))
        calls += [a for a in actions if isinstance(a, Dispatch) and a.call.mfc == "gen"]
        after = SCHEDULE.span(step + 1) if step + 1 < SCHEDULE.n_steps else PromptRange(step, 0, 0)
        outputs = {i: rows("tokens", p, p + 1, 0) for i, p in enumerate(range(span.start, span.stop))}
        carried = {i: rows("carried", p, p + 1, PROMPT, 1 + p) for i, p in enumerate(range(after.start, after.stop))}
        state.handle(RowsReady("gen", span, outputs, carried=carried))
        actions = state.handle(RowsReady("train", span, {}))
        calls += [a for a in actions if isinstance(a, Dispatch) and a.call.mfc == "gen"]
    assert state.is_over
    return calls


def carried_of(call: Dispatch) -> tuple[int, ...]:
    """Return the lengths of the carried rows of a call."""
    columns = call.call.inputs.columns
    return columns["carried"].lengths if "carried" in columns else ()


def test_rows_are_carried_to_the_next_step() -> None:
    state = MasterState(GRAPH, PLAN, SCHEDULE, strict_step_order=True)
    calls = play(state, 0)
    assert [carried_of(call) for call in calls] == [(), (3, 4), (5,)]
    holders = calls[1].call.holders
    ranks = [holders.groups[n][0] for n in holders.rows["carried"]]
    assert ranks == [0, 1] and "carried" in calls[1].call.shared


def test_a_checkpoint_has_the_rows_of_the_next_step() -> None:
    state = MasterState(GRAPH, PLAN, SCHEDULE, strict_step_order=True)
    state.start()
    span = SCHEDULE.span(0)
    assert state.carried_rows(1) is None
    state.handle(RowsReady(None, span, {0: rows("prompts", 0, 2, PROMPT)}))
    carried = {i: rows("carried", 2 + i, 3 + i, PROMPT, 3 + i) for i in range(2)}
    state.handle(RowsReady("gen", span, {0: rows("tokens", 0, 2, 0)}, carried=carried))
    saved = state.carried_rows(1)
    assert saved == BatchMeta((RowId(2, PROMPT), RowId(3, PROMPT)), {"carried": ColumnMeta("uint8", (3, 4))})
    assert state.carried_rows(2) is None
    resumed = MasterState(GRAPH, PLAN, replace(SCHEDULE, first_step=1), strict_step_order=True, carried=saved)
    calls = play(resumed, 1)
    assert [carried_of(call) for call in calls] == [(3, 4), (5,)]
    holders = calls[0].call.holders
    assert [holders.groups[n][0] for n in holders.rows["carried"]] == [0, 0]  # worker 0 has read them
