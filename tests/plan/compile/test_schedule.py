"""The scheduler with workers that reply in any order."""

from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from realhf.api.batch_meta import PROMPT, BatchMeta, ColumnMeta, RowId
from realhf.api.codec import from_json, to_json
from realhf.api.execution_plan import ExecutionPlan, Placement
from realhf.api.graph import MFC, Graph, InterfaceSpec, Kind
from realhf.api.layout import DeviceMesh, Layout, ParallelStrategy
from realhf.plan.compile.schedule import Action, Dispatch, FetchRows, FinishStep, MasterState, RowsReady, next_resample
from realhf.plan.compile.transfer import plan_transfer, stored_row_id
from realhf.plan.train_schedule import PromptRange, TrainSchedule
from tests.scaling import examples

Pick = Callable[[int], int]
Keep = Callable[[str, RowId], bool]
MADE = ("tokens", "logprobs")
MESHES = {"gen": (0, 1), "rew": (2,), "ref": (1, 2), "critic": (2, 3), "train": (0, 1), "critic_train": (3, 2)}
SCHEDULE = TrainSchedule(batch_size=4, n_prompts=14, n_steps=4)  # the last step has two prompts
PICKS = st.lists(st.integers(0, 1 << 16), min_size=1, max_size=40)


def ppo(**sizes: int) -> Graph:
    """Return a graph of six calls; ``sizes`` are batch sizes other than the default."""
    spec = InterfaceSpec("any")
    train_inputs = (*MADE, "rewards", "ref", "values")
    mfcs = (
        MFC("gen", "actor", Kind.GENERATE, spec, ("prompts", "row"), MADE),
        MFC("rew", None, Kind.INFERENCE, spec, ("tokens", "row"), ("rewards",)),
        MFC("ref", "ref", Kind.INFERENCE, spec, ("tokens", "row", "rewards"), ("ref",)),
        MFC("critic", "critic", Kind.INFERENCE, spec, ("tokens",), ("values",)),
        MFC("train", "actor", Kind.TRAIN, spec, train_inputs, n_minibatches=2),
        MFC("critic_train", "critic", Kind.TRAIN, spec, train_inputs),
    )
    resamples = {"rew": sizes.pop("resamples", 0)}
    sized = (replace(m, batch_size=sizes.get(m.name, SCHEDULE.batch_size)) for m in mfcs)
    return Graph(tuple(replace(m, resamples=resamples.get(m.name, 0)) for m in sized))


def plan_of(graph: Graph) -> ExecutionPlan:
    layouts = {n: Layout(DeviceMesh(ranks), ParallelStrategy(len(ranks))) for n, ranks in MESHES.items()}
    return ExecutionPlan(4, {m.name: Placement(layouts[m.name]) for m in graph.mfcs})


def made(ids: list[RowId], keys: tuple[str, ...]) -> BatchMeta:
    return BatchMeta(tuple(ids), {k: ColumnMeta("int64", tuple(3 + i.prompt % 5 for i in ids)) for k in keys})


def reply(state: MasterState, action: FetchRows | Dispatch, keep: Keep) -> RowsReady:
    """Return the reply of the workers: two samples per prompt of a generation, else the requested rows."""
    if isinstance(action, FetchRows):
        half = (action.span.start + action.span.stop) // 2
        parts = {0: range(action.span.start, half), 1: range(half, action.span.stop)}
        made_by = {r: made([RowId(p, PROMPT) for p in part], state.graph.dataset_keys) for r, part in parts.items()}
        return RowsReady(None, action.span, made_by)
    mfc, held = state.graph[action.call.mfc], dict[int, list[RowId]]()
    for head, part in zip(state.plan[mfc.name].layout.dp_heads(), action.call.assignment, strict=True):
        ids = [action.call.inputs.ids[i] for i in part]
        ids = [RowId(i.prompt, s) for i in ids for s in (0, 1)] if mfc.kind is Kind.GENERATE else ids
        at = 3 if (mfc.name, action.span) in state.replayed else head
        held.setdefault(at, []).extend(i for i in ids if keep(mfc.name, i))
    return RowsReady(mfc.name, action.span, {r: made(i, mfc.outputs) for r, i in held.items()} if mfc.outputs else {})


@dataclass
class Trace:
    """A run: the log of all actions and events, and the actions of every event."""

    state: MasterState
    first: list[Action]
    events: list[tuple[RowsReady, list[Action]]] = field(default_factory=list)
    log: list[tuple[str, str, int, int]] = field(default_factory=list)  # what, mfc, start, stop
    dispatched: list[Dispatch] = field(default_factory=list)

    def at(self, what: str, mfc: str, position: int) -> int:
        """Return the log index of ``what`` for the prompt at ``position``."""
        return next(i for i, (w, m, a, b) in enumerate(self.log) if (w, m) == (what, mfc) and a <= position < b)

    def note(self, actions: list[Action]) -> list[FetchRows | Dispatch]:
        for action in actions:
            name = action.call.mfc if isinstance(action, Dispatch) else ""
            self.log.append((type(action).__name__, name, action.span.start, action.span.stop))
        self.dispatched += [a for a in actions if isinstance(a, Dispatch)]
        return [a for a in actions if not isinstance(a, FinishStep)]


def play(
    picks: list[int], keep: Keep = lambda mfc, row: True, staleness: int = 0, strict: bool = False,
    replayed: Collection[int] = (), pause: int | None = None, **sizes: int,
) -> Trace:  # fmt: skip
    """``replayed`` are steps whose rows of ``gen``, in calls of two prompts, are in a checkpoint.

    With ``pause`` training of each step waits for so many events, or until nothing else is in progress.
    """
    graph = ppo(**sizes)
    schedule = replace(SCHEDULE, resamples=graph.filter_mfc.resamples if graph.filter_mfc else 0)
    known = [("gen", PromptRange(step, a, a + 2)) for step in replayed for a in (4 * step, 4 * step + 2)]
    state = MasterState(graph, plan_of(graph), schedule, staleness, strict, known, pauses_training=pause is not None)
    trace = Trace(state, state.start())
    todo, waited = trace.note(trace.first), 0
    while todo:
        event = reply(state, todo.pop(picks[len(trace.events) % len(picks)] % len(todo)), keep)
        trace.log.append(("Done", event.mfc or "", event.span.start, event.span.stop))
        actions = state.handle(event)
        trace.events.append((event, actions))
        assert len(trace.events) < 400, "the run does not end"
        todo += trace.note(actions)
        waited = waited + 1 if state.is_paused and not any(isinstance(a, FinishStep) for a in actions) else 0
        if state.is_paused and (waited >= (pause or 0) or not todo):
            trace.log.append(("Resume", "", 0, 0))
            trace.events.append((RowsReady(None, event.span, {}), state.resume()))
            todo += trace.note(trace.events[-1][1])
    return trace


def best_of_two(mfc: str, row: RowId) -> bool:
    return mfc != "rew" or row.sample == row.prompt % 2


@settings(max_examples=examples(40))
@given(PICKS, st.integers(1, 5), st.integers(1, 5), st.integers(0, 2))
def test_every_call_processes_every_prompt_once(picks: list[int], gen: int, train: int, staleness: int) -> None:
    trace = play(picks, staleness=staleness, gen=gen, rew=3, train=train)
    assert trace.state.is_over and trace.state.finished_steps == 4
    for mfc in trace.state.graph.mfcs:
        calls = [d for d in trace.dispatched if d.call.mfc == mfc.name]
        spans = [d.span for d in calls]
        assert [p for s in spans for p in range(s.start, s.stop)] == list(range(14))
        assert all(s.stop - s.start <= mfc.batch_size and s.start // 4 == (s.stop - 1) // 4 == s.step for s in spans)
        samples = (PROMPT,) if mfc.name == "gen" else (0, 1)
        assert [i for d in calls for i in d.call.inputs.ids] == [RowId(p, s) for p in range(14) for s in samples]
        assert all(set(d.call.inputs.columns) == set(mfc.inputs) and d.call.step == d.span.step for d in calls)


@settings(max_examples=examples(40))
@given(PICKS, st.sampled_from([1, 3, 4]))
def test_on_policy_generation_waits_for_the_previous_step(picks: list[int], size: int) -> None:
    trace = play(picks, gen=size, train=size)
    for step in (1, 2, 3):
        assert trace.at("Dispatch", "gen", 4 * step) > trace.at("Done", "train", 4 * step - 1)
        assert trace.at("Dispatch", "critic", 4 * step) > trace.at("Done", "critic_train", 4 * step - 1)
    assert all(d.call.version == (d.span.step if d.call.mfc not in ("rew", "ref") else 0) for d in trace.dispatched)


def test_calls_of_an_mfc_do_not_overlap() -> None:
    running: set[str] = set()
    for what, mfc, _, _ in play([5, 0, 3], gen=1, rew=1, ref=2).log:
        if what == "Dispatch":
            assert mfc not in running
            running.add(mfc)
        elif what == "Done":
            running.discard(mfc)


@settings(max_examples=examples(40))
@given(PICKS, st.integers(1, 4))
def test_staleness_one_limits_generation_to_one_step_ahead(picks: list[int], size: int) -> None:
    trace = play(picks, staleness=1, gen=size)
    for step in (2, 3):
        assert trace.at("Dispatch", "gen", 4 * step) > trace.at("Done", "train", 4 * (step - 1) - 1)
    for d in trace.dispatched:
        if d.call.mfc in ("gen", "critic"):
            assert d.span.step - 1 <= d.call.version <= d.span.step
        elif d.call.mfc == "train":
            assert d.call.version == d.span.step


def test_staleness_one_overlaps_generation_and_training() -> None:
    trace = play([0], staleness=1)
    assert trace.at("Dispatch", "gen", 4) < trace.at("Dispatch", "train", 0)


@settings(max_examples=examples(40))
@given(PICKS, PICKS, st.integers(0, 3), st.integers(0, 3), st.integers(1, 5), st.integers(1, 4))
def test_in_strict_order_the_age_of_weights_does_not_depend_on_timing(
    first: list[int], second: list[int], staleness: int, resamples: int, rate: int, size: int
) -> None:
    """For any order of replies, every call uses the same weights, and no run hangs."""
    runs = [
        play(picks, keep_some(rate, 0), staleness, True, resamples=resamples, gen=size) for picks in (first, second)
    ]
    schedule = runs[0].state.schedule
    assert all(run.state.is_over for run in runs)
    for d in (d for run in runs for d in run.dispatched if d.call.mfc in ("gen", "critic")):
        is_resampled = d.span.start >= schedule.span(d.span.step).stop
        age = max(0, staleness - is_resampled) if d.call.mfc == "gen" else 0
        assert d.call.version == max(0, d.span.step - age)


@settings(max_examples=examples(30))
@given(PICKS, st.integers(0, 1))
def test_events_determine_actions_after_a_json_round_trip(picks: list[int], staleness: int) -> None:
    trace = play(picks, best_of_two, staleness, train=3)
    again = MasterState(trace.state.graph, trace.state.plan, SCHEDULE, staleness)
    assert again.start() == trace.first
    for event, actions in trace.events:
        assert again.handle(from_json(to_json(event), RowsReady)) == actions


@settings(max_examples=examples(30))
@given(PICKS, st.integers(0, 2))
def test_data_is_prefetched_with_a_limit(picks: list[int], staleness: int) -> None:
    trace = play(picks, staleness=staleness)
    assert [a.span.step for a in trace.first] == list(range(min(2 + staleness, 4)))
    fetched = finished = 0
    for what, _, start, _ in trace.log:
        if what == "FetchRows":
            assert start == 4 * fetched
            fetched += 1
        finished += what == "FinishStep"
        assert fetched <= finished + 2 + staleness
    assert fetched == finished == 4


@settings(max_examples=examples(40))
@given(PICKS)
def test_dropped_rows_are_dropped_downstream(picks: list[int]) -> None:
    trace = play(picks, best_of_two, rew=2)
    assert trace.state.is_over
    for d in trace.dispatched:
        kept = [RowId(p, p % 2) for p in range(d.span.start, d.span.stop)]
        if d.call.mfc in ("ref", "train", "critic_train"):
            assert list(d.call.inputs.ids) == kept


@settings(max_examples=examples(40))
@given(PICKS, st.sampled_from([1, 4]))
def test_a_prompt_or_a_step_without_rows_does_not_hang(picks: list[int], size: int) -> None:
    trace = play(picks, lambda mfc, row: mfc != "rew" or (row.prompt % 3 == 0 and row.prompt // 4 != 1), train=size)
    assert trace.state.is_over
    trained = [i.prompt for d in trace.dispatched if d.call.mfc == "train" for i in d.call.inputs.ids]
    assert trained == [0, 0, 3, 3, 9, 9, 12, 12]


def test_prompts_dropped_before_generation_do_not_hang() -> None:
    assert play([0], lambda mfc, row: mfc != "gen" or row.prompt > 5).state.is_over
    spec = InterfaceSpec("any")
    pick = MFC("pick", None, Kind.INFERENCE, spec, ("row",), ("chosen",), 2)
    graph = Graph((pick, MFC("gen", "actor", Kind.GENERATE, spec, ("prompts", "chosen"), ("tokens",), 2)))
    layout = Placement(Layout(DeviceMesh((0,)), ParallelStrategy()))
    state = MasterState(graph, ExecutionPlan(1, {"pick": layout, "gen": layout}), TrainSchedule(2, 2, 1))
    state.start()
    state.handle(
        RowsReady(None, PromptRange(0, 0, 2), {0: made([RowId(0, PROMPT), RowId(1, PROMPT)], graph.dataset_keys)})
    )
    (dispatch,) = state.handle(RowsReady("pick", PromptRange(0, 0, 2), {0: made([RowId(1, PROMPT)], ("chosen",))}))
    assert dispatch.call.inputs.ids == (RowId(1, PROMPT),)


@settings(max_examples=examples(40))
@given(PICKS, st.booleans(), st.sets(st.integers(0, 3)), st.integers(0, 2))
def test_holders_are_correct_and_no_row_is_sent_twice(
    picks: list[int], is_best: bool, replayed: set[int], staleness: int
) -> None:
    keep = best_of_two if is_best else lambda mfc, row: True
    trace = play(picks, keep, staleness, replayed=replayed, gen=2, train=3)
    assert wrong_rows(trace, staleness) == []


@settings(max_examples=examples(60))
@given(PICKS, st.integers(0, 3), st.integers(0, 2), st.integers(1, 4), st.integers(0, 12))
def test_training_waits_for_an_evaluation(picks: list[int], ahead: int, resamples: int, size: int, pause: int) -> None:
    """Nothing is trained between the end of a step and ``resume``; all else is as without a pause."""
    sizes, keep = {"resamples": resamples, "gen": size}, keep_some(2, 0)
    trace, whole = (play(picks, keep, ahead, True, pause=some, **sizes) for some in (pause, None))
    trained = [[d.span for d in run.dispatched if d.call.mfc == "train"] for run in (trace, whole)]
    assert trace.state.is_over and trained[0] == trained[1] and wrong_rows(trace, staleness=0) == []
    may_train = False
    for what, mfc, *_ in trace.log:
        may_train = what == "Resume" or (may_train and what != "FinishStep")
        assert may_train or (what, mfc) not in {("Dispatch", "train"), ("Dispatch", "critic_train")}


def wrong_rows(trace: Trace, staleness: int) -> list[str]:
    """Return calls that lack rows, or get rows again, if workers execute messages in sending order."""
    wrong, stores = list[str](), {rank: set[tuple[str, RowId]]() for rank in range(4)}
    for event, actions in trace.events:
        for rank, meta in event.outputs.items():
            stores[rank] |= {(key, row) for key in meta.columns for row in meta.ids}
        for a in [a for a in actions if isinstance(a, Dispatch) and (a.call.mfc, a.span) not in trace.state.replayed]:
            call, layout = a.call, trace.state.plan[a.call.mfc].layout
            copies = plan_transfer(call, tuple(call.transferred), layout)
            is_brought = staleness and a.call.mfc == "critic_train"  # "rew" has brought rows to worker 2
            wrong += [f"{c} is late" for c in copies if is_brought and c.key in MADE and c.src in MESHES["gen"]]
            for c in copies:
                is_needed = (c.key, c.row) in stores[c.src] and (c.key, c.row) not in stores[c.dst]
                wrong += [] if is_needed else [f"{c} of {call.mfc}"]
                stores[c.dst].add((c.key, c.row))
            for rank, part in zip(layout.dp_heads(), call.assignment, strict=True):
                need = {(k, stored_row_id(call.inputs.ids[i], k, call.shared)) for k in call.holders.rows for i in part}
                wrong += [f"{call.mfc} lacks {row}" for row in need - stores[rank]]
    return wrong


def keep_some(rate: int, salt: int) -> Keep:
    """Keep one prompt in ``rate``; the filter drops the others."""
    return lambda mfc, row: mfc != "rew" or (row.prompt * 2654435761 + salt) % 97 % rate == 0


@settings(max_examples=examples(60))
@given(PICKS, st.integers(1, 6), st.integers(0, 96), st.integers(1, 5), st.integers(1, 4), st.integers(0, 2))
def test_resampling_of_filtered_prompts(
    picks: list[int], rate: int, salt: int, resamples: int, size: int, staleness: int
) -> None:
    keep = keep_some(rate, salt)
    trace = play(picks, keep, staleness, resamples=resamples, gen=size, rew=size, train=size)
    stride = 4 * (1 + resamples)
    finished = [(a, b) for what, _, a, b in trace.log if what == "FinishStep"]
    assert trace.state.is_over and [a // stride for a, _ in finished] == [0, 1, 2, 3]
    for step, (start, stop) in enumerate(finished):
        draws = [(a, b) for what, _, a, b in trace.log if what == "FetchRows" and a // stride == step]
        assert (draws[0][0], draws[-1][1]) == (start, stop) == (stride * step, stop) and len(draws) <= 1 + resamples
        assert all(before[1] == after[0] for before, after in zip(draws, draws[1:], strict=False))
        kept = [p for p in range(start, stop) if keep("rew", RowId(p, 0))]
        wanted = 2 if step == 3 else 4
        enough = [sum(keep("rew", RowId(p, 0)) for p in range(start, b)) >= wanted for _, b in draws]
        assert enough[-1] or len(draws) == 1 + resamples
        assert not any(enough[:-1]), "resampled although enough prompts were kept"
        for name in ("train", "critic_train", "ref"):
            rows = [
                i for d in trace.dispatched if d.call.mfc == name and d.span.step == step for i in d.call.inputs.ids
            ]
            assert rows == [RowId(p, s) for p in kept[:wanted] for s in (0, 1)]
        seen = [p for d in trace.dispatched if d.call.mfc == "gen" and d.span.step == step
                for p in range(d.span.start, d.span.stop)]  # fmt: skip
        assert seen == list(range(start, stop))
    trained = [d for d in trace.dispatched if d.call.mfc == "train"]
    assert all(len({i.prompt for i in d.call.inputs.ids}) <= size for d in trained)
    again = MasterState(trace.state.graph, trace.state.plan, trace.state.schedule, staleness)
    assert again.start() == trace.first and all(again.handle(event) == actions for event, actions in trace.events)


def test_resampling_without_filtered_prompts_only_changes_positions() -> None:
    plain, drawn = play([3, 1, 2]), play([3, 1, 2], resamples=2)
    assert [(what, mfc) for what, mfc, _, _ in drawn.log] == [(what, mfc) for what, mfc, _, _ in plain.log]
    assert [a - 8 * (a // 12) for _, _, a, _ in drawn.log] == [a for _, _, a, _ in plain.log]


@pytest.mark.parametrize(
    ("sampled", "kept", "wanted", "n"),
    [(8, 0, 8, 8), (8, 4, 8, 8), (8, 6, 8, 3), (8, 7, 8, 2), (12, 1, 8, 8), (4, 3, 4, 2)],
)
def test_next_resample(sampled: int, kept: int, wanted: int, n: int) -> None:
    assert next_resample(sampled, kept, wanted, limit=8) == n


def test_rows_of_a_prompt_must_come_from_one_worker() -> None:
    state = MasterState(graph := ppo(), plan_of(graph), SCHEDULE)
    state.start()
    with pytest.raises(AssertionError, match="two workers produced rows of prompt 0"):
        state.handle(RowsReady(None, SCHEDULE.span(0), dict.fromkeys((0, 1), made([RowId(0, PROMPT)], ("prompts",)))))


def test_shared_keys_and_minibatches() -> None:
    calls = {d.call.mfc: d.call for d in play([0]).dispatched if d.span.step == 0}
    assert calls["rew"].shared == ("row",) and calls["gen"].shared[0] == "prompts" and calls["train"].shared == ()
    assert calls["train"].minibatches == (0, 0, 0, 0, 1, 1, 1, 1) and set(calls["ref"].minibatches) == {0}


def test_state_is_per_role() -> None:
    state = MasterState(graph := ppo(), plan_of(graph), TrainSchedule(2, 4, 2))
    todo, seen = state.start(), []
    while todo:
        action = todo.pop(0)
        if isinstance(action, FinishStep):
            continue
        event = reply(state, action, lambda mfc, row: True)
        if isinstance(action, Dispatch):
            seen.append((action.call.mfc, action.call.state))
            event = replace(event, state={"trained": action.span.step + 1} if action.call.mfc == "train" else None)
        todo += state.handle(event)
    assert [s for m, s in seen if m in ("gen", "train")] == [{}, {}, {"trained": 1}, {"trained": 1}]
    assert [s for m, s in seen if m in ("rew", "ref", "critic")] == [{}] * 6


def test_rows_of_a_finished_step_are_held_until_the_next_event() -> None:
    trace, prompts = play([0]), range(12, 14)
    held = trace.state.holders_of(prompts, ("tokens", "row"))
    assert sorted(row for rows in held.values() for row in rows) == [
        RowId(p, s) for p in prompts for s in (PROMPT, 0, 1)
    ]
    assert set(held) <= {0, 1} and trace.state.holders_of(range(12), trace.state.keys) == {}


def test_start_at_a_later_step() -> None:
    state = MasterState(graph := ppo(), plan_of(graph), TrainSchedule(4, 14, 4, first_step=2))
    todo, seen = state.start(), []
    while todo:
        action = todo.pop(0)
        seen.append((type(action).__name__, action.span))
        if not isinstance(action, FinishStep):
            todo += state.handle(reply(state, action, lambda mfc, row: True))
    spans = [PromptRange(2, 8, 12), PromptRange(3, 12, 14)]
    assert state.is_over and {span for _, span in seen} == set(spans)
    assert [span for name, span in seen if name == "FinishStep"] == spans and len(seen) == 2 * (1 + 6 + 1)
