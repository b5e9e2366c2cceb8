"""Calls carried out by gloo ranks: rows travel to where they are wanted, weights to where they are borrowed."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from realhf.api.batch_meta import PROMPT, BatchMeta, ColumnMeta, RowId
from realhf.api.config import ModelSpec
from realhf.api.execution_plan import MicroBatching
from realhf.api.experiment import RoleSpec
from realhf.api.graph import MFC, Graph, InterfaceSpec, Kind
from realhf.api.messages import Holders, PrepareCall, State, Stats
from realhf.base.timers import Spans
from realhf.data.batch import Column, SequenceBatch
from realhf.data.protocols import Engine
from realhf.plan.compile.schedule import Dispatch, MasterState, RowsReady
from realhf.system.executor import CallResult, Executor
from tests.models.engine.tiny_engine import counted, engine_on, nll, rows_of
from tests.system.conftest import layout_on, run_of

CPU = torch.device("cpu")
SPEC = InterfaceSpec("written here")
ANSWER = MFC("answer", None, Kind.INFERENCE, SPEC, ("prompts",), ("tokens",), batch_size=5)
WEIGH = MFC("weigh", None, Kind.INFERENCE, SPEC, ("tokens", "prompts"), ("weight",), batch_size=5)
JUDGE = MFC("judge", None, Kind.INFERENCE, SPEC, ("weight", "tokens"), ("verdict",), batch_size=5)


class Answer:
    """Prompt p has p % 3 answers; each is the prompt and its own number."""

    def inference(self, engine: None, batch: SequenceBatch, state: State) -> tuple[SequenceBatch, Stats]:
        own = dict(zip(batch.ids, batch.columns["prompts"].rows(), strict=True))
        rows = {RowId(i.prompt, s): torch.cat([row, torch.tensor([s])])
                for i, row in own.items() for s in range(i.prompt % 3)}  # fmt: skip
        tokens = Column.of(list(rows.values())) if rows else Column(torch.empty(0, dtype=torch.int64), ())
        return SequenceBatch(tuple(rows), {"tokens": tokens}), {"answers": (float(len(rows)), 1.0)}


class Weigh:
    """Adds up an answer and, from its own copy, the prompt."""

    def inference(self, engine: None, batch: SequenceBatch, state: State) -> tuple[SequenceBatch, Stats]:
        pairs = zip(*(batch.columns[key].rows() for key in ("tokens", "prompts")), strict=True)
        sums = [float(tokens.sum() + 1000 * prompt.sum()) for tokens, prompt in pairs]
        return SequenceBatch(batch.ids).with_scalars("weight", torch.tensor(sums)), {}


class Judge:
    def inference(self, engine: None, batch: SequenceBatch, state: State) -> tuple[SequenceBatch, Stats]:
        sums = [float(tokens.sum()) for tokens in batch.columns["tokens"].rows()]
        return SequenceBatch(batch.ids).with_scalars("verdict", batch["weight"] - torch.tensor(sums)), {}


def prompts() -> SequenceBatch:
    rows = [torch.arange(1, 2 + p) for p in range(5)]
    return SequenceBatch(tuple(RowId(p, PROMPT) for p in range(5)), {"prompts": Column.of(rows)})


def everybody_s(world: int, outcome: CallResult) -> dict[int, BatchMeta]:
    """What the master would know after the call."""
    metas: list[BatchMeta | None] = [None] * world
    dist.all_gather_object(metas, outcome.outputs.meta if outcome.outputs else None)
    return {rank: meta for rank, meta in enumerate(metas) if meta is not None}


def three_calls(rank: int, world: int) -> dict[str, Any]:
    """Prompts lie on rank 0; answers come to be on 0 and 1, weights on 2 and 1, verdicts on 0."""
    meshes = {"answer": (0, 1), "weigh": (2, 1), "judge": (0,)}
    run = run_of(Graph((ANSWER, WEIGH, JUDGE)), meshes, Path(), n_rows=5, batch=5)
    executor = Executor(run, rank, CPU, {}, {"answer": Answer(), "weigh": Weigh(), "judge": Judge()}, Spans())
    state = MasterState(run.graph, run.plan, run.schedule)
    state.start()
    span = run.schedule.span(0)
    if rank == 0:
        executor.store.put(prompts())
    event = RowsReady(None, span, {0: prompts().meta})
    stats = {}
    for name in meshes:
        call = next(a.call for a in state.handle(event) if isinstance(a, Dispatch) and a.call.mfc == name)
        executor.receive_inputs(call)
        outcome = executor.execute(call)
        stats[name] = (outcome.stats, outcome.outputs is not None)
        event = RowsReady(name, span, everybody_s(world, outcome))
    rows = tuple(RowId(p, s) for p in range(5) for s in range(p % 3))
    verdicts = {row: float(value) for row, value in executor.held(rows, "verdict").items()}
    spans = [name for name, _, _ in executor.spans.take()]
    executor.store.drop(0, 5)
    return {"stats": stats, "verdicts": verdicts, "spans": spans, "left": len(executor.store)}


@pytest.mark.dist
def test_rows_travel_through_three_calls(on_ranks: Callable[..., list[Any]]) -> None:
    answers = on_ranks(3, three_calls)
    expected = {RowId(p, s): 1000.0 * sum(range(2 + p)) for p in range(5) for s in range(p % 3)}
    assert answers[0]["verdicts"] == expected
    assert answers[1]["verdicts"] == answers[2]["verdicts"] == {}
    counts = [answer["stats"]["answer"] for answer in answers]
    assert sum(stats["answers"][0] for stats, _ in counts[:2]) == len(expected) and counts[2] == (None, False)
    assert [answer["stats"]["weigh"][1] for answer in answers] == [False, True, True]
    names = [f"{mfc}/{step}" for mfc in ("answer", "weigh", "judge") for step in ("Transfer", "Compute")]
    assert all(answer["spans"] == names and answer["left"] == 0 for answer in answers)


GENERATE = MFC("gen", "actor", Kind.GENERATE, SPEC, ("prompts",), ("tokens",))
TRAIN = MFC("train", "actor", Kind.TRAIN, SPEC, ("tokens",))


class Look:
    """Tells whether the weights are there, and what they are."""

    def __init__(self) -> None:
        self.seen: list[torch.Tensor] = []

    def generate(self, engine: Engine, batch: SequenceBatch, state: State) -> tuple[SequenceBatch, Stats]:
        self.seen.append(engine.params.data[: engine.params.end].clone())
        return SequenceBatch((), {"tokens": Column(torch.empty(0, dtype=torch.int64), ())}), {}


def empty_call(mfc: str, world: int) -> PrepareCall:
    inputs = BatchMeta((), {"prompts": ColumnMeta("int64", ())})
    return PrepareCall(0, mfc, 0, 0, inputs, Holders((), {"prompts": ()}), (), ((),) * world, (), {})


def borrow_twice(rank: int, world: int, folder: Path, home: tuple[int, ...], away: tuple[int, ...]) -> dict[str, Any]:
    """Generate elsewhere, train at home, generate again."""
    role = RoleSpec(ModelSpec(str(folder)))
    run = run_of(Graph((GENERATE, TRAIN)), {"gen": away, "train": home}, Path(), roles={"actor": role})
    engines = {}
    # every rank must make the groups of every layout
    keeper, borrower = (engine_on(folder, rank, mesh, trained=trained) if rank in mesh else None
                        for mesh, trained in ((home, len(home) == 1), (away, False)))  # fmt: skip
    if keeper is not None:
        engines["actor", layout_on(*home)] = keeper
    if borrower is not None:
        borrower.params.free()
        engines["actor", layout_on(*away)] = borrower
    look = Look()
    executor = Executor(run, rank, CPU, engines, {"gen": look}, Spans())
    had = []
    for _ in range(2):
        executor.execute(empty_call("gen", len(away)))
        if keeper is not None:
            had.append(keeper.params.data[: keeper.params.end].clone())
            batch = rows_of((4, 7), vocab=keeper.config.vocab)
            if keeper.optimizer is not None:
                keeper.train(batch, nll, counted(batch))
            else:
                keeper.params.data.add_(1.0)
    bytes_left = borrower.params.data.untyped_storage().nbytes() if borrower is not None else 0
    return {"seen": look.seen, "had": had, "left": bytes_left, "plans": len(executor._moves)}


@pytest.mark.dist
@pytest.mark.parametrize("home, away", [((0,), (0, 1)), ((2,), (1, 0)), ((0, 1), (2,)), ((0, 1, 2), (1,))])
def test_weights_are_lent_as_they_are_and_given_back(
    home: tuple[int, ...], away: tuple[int, ...], actor_folder: Path, on_ranks: Callable[..., list[Any]]
) -> None:
    answers = on_ranks(3, borrow_twice, actor_folder, home, away)
    had = answers[home[0]]["had"]
    assert not torch.equal(had[0], had[1])
    for rank, answer in enumerate(answers):
        assert answer["left"] == 0 and answer["plans"] == 1
        assert len(answer["seen"]) == (2 if rank in away else 0)
        assert all(torch.equal(seen, kept) for seen, kept in zip(answer["seen"], had, strict=False))


def lend_to_one_that_rounds(rank: int, world: int, folder: Path, verify: bool) -> str:
    """Rank 0 lends float32 weights, rank 1 holds them in 16 bits; return what was raised."""
    roles = {"actor": RoleSpec(ModelSpec(str(folder)))}
    run = run_of(Graph((GENERATE, TRAIN)), {"gen": (1,), "train": (0,)}, Path(), roles=roles)
    run.config.verify_reallocation = verify
    engine = engine_on(folder, rank, (rank,), trained=False, bf16=rank == 1)
    executor = Executor(run, rank, CPU, {("actor", layout_on(rank)): engine}, {"gen": Look()}, Spans())
    try:
        executor.execute(empty_call("gen", 1))
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.dist
def test_a_move_that_changes_weights_is_named_where_that_is_asked_for(
    actor_folder: Path, on_ranks: Callable[..., list[Any]]
) -> None:
    assert on_ranks(2, lend_to_one_that_rounds, actor_folder, False) == ["", ""]
    lender, borrower = on_ranks(2, lend_to_one_that_rounds, actor_folder, True)
    assert lender == ""
    assert "BoxCopy(name='embed.weight'" in borrower and "corrupted between rank 0 and rank 1" in borrower


@dataclass(frozen=True)
class NamedEngine:
    """As much of an engine as a call sets."""

    micro_batching: MicroBatching | None = None
    version: int = -1


def test_a_training_call_brings_the_minibatch_numbers(tmp_path: Path) -> None:
    seen = []

    class Keep:
        def train_step(self, engine: Engine, batch: SequenceBatch, state: State) -> tuple[Stats, State]:
            seen.append((batch, engine.version, engine.micro_batching))
            return {"loss": (1.0, 2.0)}, {"steps": state.get("steps", 0) + 1}

    train = MFC("train", "actor", Kind.TRAIN, SPEC, ("tokens",), batch_size=2, n_minibatches=2)
    run = run_of(Graph((train,)), {"train": (0,)}, tmp_path, n_rows=2)
    engine = NamedEngine()
    executor = Executor(run, 0, CPU, {("actor", layout_on(0)): engine}, {"train": Keep()}, Spans())
    rows = rows_of((3, 2)).only(("tokens",))
    executor.store.put(rows)
    state = MasterState(run.graph, run.plan, run.schedule)
    state.start()
    (dispatch,) = state.handle(RowsReady(None, run.schedule.span(0), {0: rows.meta}))
    executor.receive_inputs(dispatch.call)
    outcome = executor.execute(dispatch.call)
    batch, version, limits = seen[0]
    assert batch["minibatch"].tolist() == [0, 1] and torch.equal(batch["tokens"], rows["tokens"])
    assert version == 0 and limits == run.plan["train"].micro_batching
    assert outcome == CallResult(None, {"loss": (1.0, 2.0)}, {"steps": 1})
