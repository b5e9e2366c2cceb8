"""Simulation of the master on simulated workers."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from realhf.api.batch_meta import PROMPT, RowId
from realhf.api.codec import from_json, to_json
from realhf.api.execution_plan import ExecutionPlan, Placement
from realhf.api.graph import MFC, Graph, InterfaceSpec, Kind
from realhf.api.layout import DeviceMesh, Layout, ParallelStrategy
from realhf.api.machine import Cost, Workload
from realhf.api.messages import PrepareCall
from realhf.api.program import Compute, Instruction, Load, Offload, Reallocate, Release, Transfer
from realhf.plan.compile.schedule import Dispatch, FetchRows, MasterState
from realhf.plan.search.simulate import make_rows, simulate
from realhf.plan.search.timeline import Activity, Timeline, n_steady_steps
from realhf.plan.train_schedule import PromptRange, TrainSchedule

SPEC = InterfaceSpec("any")
GRAPH = Graph(
    (
        MFC("gen", "actor", Kind.GENERATE, SPEC, ("prompts",), ("tokens",), 4),
        MFC("rew", "rew", Kind.INFERENCE, SPEC, ("tokens",), ("rewards",), 4),
        MFC("ref", "ref", Kind.INFERENCE, SPEC, ("tokens",), ("logprobs",), 4),
        MFC("train", "actor", Kind.TRAIN, SPEC, ("tokens", "rewards", "logprobs"), (), 4),
    )
)
SECONDS = {"gen": 4.0, "rew": 1.0, "ref": 2.0, "train": 3.0}
WORKLOAD = Workload(((2,), (3,)), (5, 6, 7), 2)


def on(first: int, strategy: str = "d1") -> Layout:
    cut = ParallelStrategy.parse(strategy)
    return Layout(DeviceMesh(tuple(range(first, first + cut.world))), cut)


def price(call: PrepareCall, instruction: Instruction) -> Cost:
    match instruction:
        case Compute(mfc):
            return Cost(SECONDS[mfc], SECONDS[mfc])
        case Release():
            return Cost(0.0, 0.0)
        case _:
            return Cost(0.5, 0.0)


def run(layouts: dict[str, Layout], graph: Graph = GRAPH, n_steps: int = 3, **options: float) -> Timeline:
    plan = ExecutionPlan(2, {name: Placement(layout) for name, layout in layouts.items()})
    length = TrainSchedule(4, 4 * n_steps, n_steps)
    return simulate(graph, plan, price, length, WORKLOAD, **options)  # type: ignore[arg-type]


def times(timeline: Timeline, step: int, kind: type) -> dict[str, tuple[float, float]]:
    return {a.mfc: (a.start, a.end) for a in timeline.activities if a.step == step and isinstance(a.instruction, kind)}


APART = {"gen": on(0), "rew": on(1), "ref": on(0), "train": on(0)}


def test_calls_on_two_meshes_overlap_and_rows_move_first() -> None:
    timeline = run(APART)
    assert times(timeline, 0, Transfer) == {"gen": (0, 0.5), "rew": (4.5, 5), "ref": (5, 5.5), "train": (7.5, 8)}
    assert times(timeline, 0, Compute) == {"gen": (0.5, 4.5), "rew": (5, 6), "ref": (5.5, 7.5), "train": (8, 11)}
    assert timeline.step_ends == (11, 22, 33) and timeline.seconds_per_step == 11
    assert timeline.busy == (1.0, 2 / 11) and timeline.idle == pytest.approx(
        9 / 22
    )  # row transfers of rew and train, and rew


def test_the_critical_path_has_no_gaps() -> None:
    timeline = run(APART, call_seconds=0.25)
    path = [timeline.activities[i] for i in timeline.critical_path]
    assert [(a.mfc, type(a.instruction).__name__) for a in path if a.step == 1] == [
        ("gen", "Transfer"), ("gen", "Compute"), ("rew", "Transfer"), ("ref", "Transfer"), ("ref", "Compute"),
        ("train", "Transfer"), ("train", "Compute"),
    ]  # fmt: skip
    assert path[0].start == 0 and path[-1].end + 0.25 == timeline.step_ends[-1]
    gaps = [later.start - earlier.end for earlier, later in zip(path, path[1:], strict=False)]
    assert set(gaps) == {0.0, 0.25} and sum(gaps) == 8 * 0.25  # three calls of every step, but for the first


def test_reallocation_and_offloading() -> None:
    graph = replace(GRAPH, offloaded=("ref",))
    timeline = run({**APART, "gen": on(0, "d2")}, graph)
    steps = [a for a in timeline.activities if a.step == 0]
    kinds = {name: [type(a.instruction) for a in steps if a.mfc == name] for name in SECONDS}
    assert kinds["gen"] == [Transfer, Reallocate, Compute, Release]
    assert kinds["ref"] == [Transfer, Load, Compute, Offload] and kinds["rew"] == [Transfer, Compute]
    assert times(timeline, 0, Reallocate) == {"gen": (0.5, 1.0)} and times(timeline, 0, Release) == {"gen": (5, 5)}
    assert timeline.step_ends[0] == 11 + 3 * 0.5


def test_shared_cores_slow_down_calls() -> None:
    timeline = run(APART, cores=1)
    assert times(timeline, 0, Compute)["rew"] == (5, 6.5)  # alone for half a second, then half a core
    assert times(timeline, 0, Compute)["ref"] == (5.5, 8)


def test_staleness_reduces_idle_time() -> None:
    away = {"gen": on(1), "rew": on(0), "ref": on(0), "train": on(0)}
    fresh, stale = (run(away, n_steps=8, max_staleness=s).seconds_per_step for s in (0, 1))
    assert stale < 9 < fresh
    assert n_steady_steps(8, 1) == 5 and n_steady_steps(2, 1) == 1 and n_steady_steps(1, 5) == 0


def test_a_run_of_one_step() -> None:
    timeline = run(APART, n_steps=1)
    assert timeline.seconds_per_step == 11 and timeline.steady_state == (0, 11)


def test_a_timeline_is_serializable() -> None:
    timeline = run(APART)
    assert from_json(to_json(timeline, Timeline), Timeline) == timeline
    assert isinstance(timeline.activities[0], Activity)


def first_dispatch(state: MasterState, until: Callable[[Dispatch], bool]) -> Dispatch:
    """Return the first dispatch that satisfies a condition."""
    todo = list(state.start())
    while True:
        action = todo.pop(0)
        if isinstance(action, Dispatch) and until(action):
            return action
        assert isinstance(action, FetchRows | Dispatch)
        todo += state.handle(make_rows(GRAPH, WORKLOAD, action, state.plan))


def test_rows_have_the_locations_and_lengths_of_a_real_run() -> None:
    layouts = {"gen": on(0, "d2p2"), "rew": on(0, "d2"), "ref": on(0), "train": on(0)}
    plan = ExecutionPlan(4, {name: Placement(layout) for name, layout in layouts.items()})
    state = MasterState(GRAPH, plan, TrainSchedule(4, 8, 2))
    fetched = make_rows(GRAPH, WORKLOAD, FetchRows(PromptRange(0, 0, 4)), plan).outputs
    assert {rank: [i.prompt for i in meta.ids] for rank, meta in fetched.items()} == {2: [0, 1], 3: [2, 3]}
    assert fetched[2].ids[0] == RowId(0, PROMPT) and fetched[2].columns["prompts"].lengths == (2, 3)
    made = make_rows(GRAPH, WORKLOAD, first_dispatch(state, lambda d: d.call.mfc == "gen"), plan).outputs
    assert sorted(made) == [2, 3]
    assert sorted(i for meta in made.values() for i in meta.ids) == [RowId(p, s) for p in range(4) for s in (0, 1)]
    lengths = {i: n for meta in made.values() for i, n in zip(meta.ids, meta.columns["tokens"].lengths, strict=True)}
    assert lengths == dict(row for p in range(4) for row in WORKLOAD.sampled_rows(p))
    rewarded = first_dispatch(MasterState(GRAPH, plan, TrainSchedule(4, 8, 2)), lambda d: d.call.mfc == "rew")
    rewards = make_rows(GRAPH, WORKLOAD, rewarded, plan).outputs
    assert {i: n for m in rewards.values() for i, n in zip(m.ids, m.columns["rewards"].lengths, strict=True)} == lengths
    assert rewards[0].columns["rewards"].dtype == "float32" and rewarded.call.inputs.columns["tokens"].dtype == "int64"
