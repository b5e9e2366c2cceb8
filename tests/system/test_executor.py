"""Calls on gloo ranks: row transfers and parameter reallocation."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from realhf.api.batch_meta import PROMPT, BatchMeta, ColumnMeta, RowId
from realhf.api.config import ModelSpec
from realhf.api.execution_plan import MicroBatching
from realhf.api.experiment import RoleSpec
from realhf.api.graph import MFC, Graph, InterfaceSpec, Kind
from realhf.api.messages import Holders, PrepareCall, State, Stats
from realhf.base.timers import Spans
from realhf.comm.process_groups import all_gather_bytes
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
    """Prompt p gets p % 3 responses; each is the prompt and the sample number."""

    def inference(self, engine: None, batch: SequenceBatch, state: State) -> tuple[SequenceBatch, Stats]:
        own = dict(zip(batch.ids, batch.columns["prompts"].rows(), strict=True))
        rows = {RowId(i.prompt, s): torch.cat([row, torch.tensor([s])])
                for i, row in own.items() for s in range(i.prompt % 3)}  # fmt: skip
        tokens = Column.of(list(rows.values())) if rows else Column(torch.empty(0, dtype=torch.int64), ())
        return SequenceBatch(tuple(rows), {"tokens": tokens}), {"answers": (float(len(rows)), 1.0)}


class Weigh:
    """Sums a response and, from another column, the prompt."""

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


def gather_outputs(result: CallResult) -> dict[int, BatchMeta]:
    """Return the outputs of all ranks."""
    gathered = all_gather_bytes(msgspec.msgpack.encode(result.outputs))
    metas = [msgspec.msgpack.decode(data, type=BatchMeta | None) for data in gathered]
    return {rank: meta for rank, meta in enumerate(metas) if meta is not None}


def three_calls(rank: int, world: int) -> dict[str, Any]:
    """Prompts are on rank 0, responses on 0 and 1, weights on 2 and 1, verdicts on 0."""
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
        result = executor.execute(call)
        stats[name] = (result.stats, result.outputs is not None)
        event = RowsReady(name, span, gather_outputs(result))
    rows = tuple(RowId(p, s) for p in range(5) for s in range(p % 3))
    found = {row: executor.store.find(row, "verdict") for row in rows}
    verdicts = {row: float(value) for row, value in found.items() if value is not None}
    spans = [name for name, _, _ in executor.spans.take()]
    executor.store.drop(0, 5)
    return {"stats": stats, "verdicts": verdicts, "spans": spans, "left": len(executor.store)}


@pytest.mark.dist
def test_rows_are_transferred_between_three_calls(on_ranks: Callable[..., list[Any]]) -> None:
    results = on_ranks(3, three_calls)
    expected = {RowId(p, s): 1000.0 * sum(range(2 + p)) for p in range(5) for s in range(p % 3)}
    assert results[0]["verdicts"] == expected
    assert results[1]["verdicts"] == results[2]["verdicts"] == {}
    counts = [result["stats"]["answer"] for result in results]
    assert sum(stats["answers"][0] for stats, _ in counts[:2]) == len(expected) and counts[2] == ({}, False)
    assert [result["stats"]["weigh"][1] for result in results] == [False, True, True]
    names = [f"{mfc}/{step}" for mfc in ("answer", "weigh", "judge") for step in ("Transfer", "Compute")]
    assert all(result["spans"] == names and result["left"] == 0 for result in results)


GENERATE = MFC("gen", "actor", Kind.GENERATE, SPEC, ("prompts",), ("tokens",))
TRAIN = MFC("train", "actor", Kind.TRAIN, SPEC, ("tokens",))


class RecordWeights:
    """Records the weights at every call."""

    def __init__(self) -> None:
        self.seen: list[torch.Tensor] = []

    def generate(self, engine: Engine, batch: SequenceBatch, state: State) -> tuple[SequenceBatch, Stats]:
        self.seen.append(engine.params.data[: engine.params.end].clone())
        return SequenceBatch((), {"tokens": Column(torch.empty(0, dtype=torch.int64), ())}), {}


def empty_call(mfc: str, world: int) -> PrepareCall:
    inputs = BatchMeta((), {"prompts": ColumnMeta("int64", ())})
    return PrepareCall(0, mfc, 0, 0, inputs, Holders((), {"prompts": ()}), (), ((),) * world, (), {})


def reallocate(rank: int, world: int, folder: Path, home: tuple[int, ...], away: tuple[int, ...]) -> dict[str, Any]:
    """Generate on ``away``, train on ``home``, generate again."""
    role = RoleSpec(ModelSpec(str(folder)))
    run = run_of(Graph((GENERATE, TRAIN)), {"gen": away, "train": home}, Path(), roles={"actor": role})
    engines = {}
    # every rank must create the groups of every layout
    trainer, generator = (engine_on(folder, rank, mesh, trained=trained) if rank in mesh else None
                        for mesh, trained in ((home, len(home) == 1), (away, False)))  # fmt: skip
    if trainer is not None:
        engines["actor", layout_on(*home)] = trainer
    if generator is not None:
        generator.params.free()
        engines["actor", layout_on(*away)] = generator
    interface = RecordWeights()
    executor = Executor(run, rank, CPU, engines, {"gen": interface}, Spans())
    home_weights = []
    for _ in range(2):
        executor.execute(empty_call("gen", len(away)))
        if trainer is not None:
            home_weights.append(trainer.params.data[: trainer.params.end].clone())
            batch = rows_of((4, 7), vocab=trainer.config.vocab)
            if trainer.optimizer is not None:
                trainer.train(batch, nll, counted(batch))
            else:
                trainer.params.data.add_(1.0)
    bytes_left = generator.params.data.untyped_storage().nbytes() if generator is not None else 0
    return {"seen": interface.seen, "home": home_weights, "left": bytes_left, "plans": len(executor._copies)}


@pytest.mark.dist
@pytest.mark.parametrize("home, away", [((0,), (0, 1)), ((2,), (1, 0)), ((0, 1), (2,)), ((0, 1, 2), (1,))])
def test_weights_are_reallocated_and_freed(
    home: tuple[int, ...], away: tuple[int, ...], actor_folder: Path, on_ranks: Callable[..., list[Any]]
) -> None:
    results = on_ranks(3, reallocate, actor_folder, home, away)
    home_weights = results[home[0]]["home"]
    assert not torch.equal(home_weights[0], home_weights[1])
    for rank, result in enumerate(results):
        assert result["left"] == 0 and result["plans"] == 1
        assert len(result["seen"]) == (2 if rank in away else 0)
        assert all(torch.equal(seen, kept) for seen, kept in zip(result["seen"], home_weights, strict=False))


def reallocate_to_bf16(rank: int, world: int, folder: Path, verify: bool) -> str:
    """Reallocate float32 weights of rank 0 to bfloat16 on rank 1; return the error message."""
    roles = {"actor": RoleSpec(ModelSpec(str(folder)))}
    run = run_of(Graph((GENERATE, TRAIN)), {"gen": (1,), "train": (0,)}, Path(), roles=roles)
    run.config.verify_reallocation = verify
    engine = engine_on(folder, rank, (rank,), trained=False, bf16=rank == 1)
    executor = Executor(run, rank, CPU, {("actor", layout_on(rank)): engine}, {"gen": RecordWeights()}, Spans())
    try:
        executor.execute(empty_call("gen", 1))
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.dist
def test_verify_reallocation_detects_changed_weights(actor_folder: Path, on_ranks: Callable[..., list[Any]]) -> None:
    assert on_ranks(2, reallocate_to_bf16, actor_folder, False) == ["", ""]
    sender, receiver = on_ranks(2, reallocate_to_bf16, actor_folder, True)
    assert sender == ""
    assert "BoxCopy(name='embed.weight'" in receiver and "was corrupted between rank 0 and rank 1" in receiver


@dataclass(frozen=True)
class NamedEngine:
    """The engine fields that a call sets."""

    micro_batching: MicroBatching | None = None
    version: int = -1


def test_a_training_call_has_minibatch_numbers(tmp_path: Path) -> None:
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
    result = executor.execute(dispatch.call)
    batch, version, limits = seen[0]
    assert batch["minibatch"].tolist() == [0, 1] and torch.equal(batch["tokens"], rows["tokens"])
    assert version == 0 and limits == run.plan["train"].micro_batching
    assert result == CallResult(None, {"loss": (1.0, 2.0)}, {"steps": 1})
