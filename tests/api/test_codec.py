"""Round trips through JSON and msgpack; unknown data is rejected."""

import typing
from typing import Any

import msgspec
import pytest

from realhf.api.batch_meta import BatchMeta, ColumnMeta, RowId
from realhf.api.codec import from_json, from_plain, to_json, to_plain
from realhf.api.execution_plan import ExecutionPlan, MicroBatching, Placement
from realhf.api.graph import MFC, Graph, InterfaceSpec, Kind
from realhf.api.layout import DeviceMesh, Layout, ParallelStrategy
from realhf.api.messages import (
    TO_MASTER,
    TO_WORKER,
    AwaitCheckpoint,
    Checkpoint,
    Done,
    ExecuteCall,
    Failed,
    Fetch,
    FreeRows,
    Heartbeat,
    Hello,
    Holders,
    PrepareCall,
    ReadRows,
    Ready,
    Save,
    Shutdown,
    Start,
    ToMaster,
    ToWorker,
)
from realhf.api.program import Compute, Instruction, Load, Offload, Program, Reallocate, Release, Transfer

META = BatchMeta(
    (RowId(0, -1), RowId(7, 2)), {"tokens": ColumnMeta("int64", (3, 0)), "r": ColumnMeta("float32", (1, 1))}
)
STATE = {"kl_coef": 0.25, "value_norm": {"mean": -1.5, "steps": [1, 2]}, "none": None}
LAYOUT = Layout(DeviceMesh((2, 0)), ParallelStrategy(2))
PLAN = ExecutionPlan(3, {"a": Placement(LAYOUT), "b": Placement(LAYOUT, MicroBatching(2, 100))})
STEPS = (Reallocate("actor", LAYOUT, "ref", LAYOUT, 0.5), Transfer(("tokens", "row"), LAYOUT),
         Compute("a", "actor", LAYOUT),
         Compute("b", None, LAYOUT), Release("actor", LAYOUT), Load("ref", LAYOUT), Offload("ref", LAYOUT))  # fmt: skip
HOLDERS = Holders(((0,), (1, 2), (1,)), {"tokens": (0, 1), "r": (2, 2)})
CALL = PrepareCall(3, "a", 1, 2, META, HOLDERS, ("r",), ((1,), (), (0,)), (0, 3), STATE)
REQUESTS = [
    Start("h", 1),
    Fetch(1, 0, 0, 8),
    CALL,
    ExecuteCall(3),
    ReadRows(1, META.ids, ("r",)),
    Save(2, 1, "actor", "a/b"),
    Checkpoint(3, 1, "checkpoints/step_2.unfinished"),
    AwaitCheckpoint(4, 1),
    FreeRows(0, 4),
    Shutdown(),
]
DONE = Done(5, 1, META, {"loss": (2.0, 4.0)}, STATE, {"rows": [{"answer": "\u00fc", "n": 1}]}, b"{}", (4, 0), META)
REPLIES = [
    Hello(0, 77, "h", 9),
    Ready(1, {"seconds": 0.5}),
    DONE,
    Done(1, 0),
    Heartbeat(0, 7, "h", "b"),
    Failed(1, "x", "e", "tb", True),
]


packed, unpacked = msgspec.msgpack.encode, msgspec.msgpack.decode


def test_every_message_of_both_unions_survives_a_round_trip() -> None:
    for messages, union, decoder in [(REQUESTS, ToWorker, TO_WORKER), (REPLIES, ToMaster, TO_MASTER)]:
        assert {type(m) for m in messages} == set(typing.get_args(union))
        for message in messages:
            decoded = decoder.decode(packed(message))
            assert decoded == message and type(decoded) is type(message)


def test_default_values_are_not_encoded() -> None:
    assert unpacked(packed(Done(1, 0))) == {"type": "Done", "request": 1, "rank": 0}


def test_row_ids_are_decoded_as_row_ids() -> None:
    decoded = TO_MASTER.decode(packed(DONE))
    assert all(isinstance(row, RowId) for row in decoded.outputs.ids) and decoded.outputs.ids[1].sample == 2


def test_plans_and_programs_survive_a_round_trip() -> None:
    assert from_json(to_json(PLAN), ExecutionPlan) == PLAN and from_json(to_json(PLAN), ExecutionPlan)["b"] == PLAN["b"]
    program: Program = {"a": STEPS, "b": ()}
    assert from_json(to_json(program, Program), Program) == program
    assert {type(step) for step in STEPS} == set(typing.get_args(Instruction))


def test_graphs_survive_a_round_trip() -> None:
    graph = Graph((MFC("gen", "actor", Kind.GENERATE, InterfaceSpec("x", {"n": [1]}), ("prompts",), ("tokens",), 4),))
    assert from_json(to_json(graph), Graph) == graph


@pytest.mark.parametrize(
    "data",
    [
        {"type": "FreeRows", "start": 0, "stop": 1, "force": True},
        {"type": "FreeRows", "start": 0},
        {"type": "FreeRows", "start": "zero", "stop": 1},
        {"type": "FreeRows", "start": None, "stop": 1},
        {"type": "Eval", "start": 0, "stop": 1},
        {"type": "Done", "request": 1, "rank": 0},
        {"start": 0, "stop": 1},
        {"type": "ReadRows", "request": 1, "ids": [[0, 0, 0]], "keys": []},
        [],
        None,
        "Shutdown",
    ],
)
def test_invalid_messages_are_rejected(data: Any) -> None:
    with pytest.raises(msgspec.ValidationError):
        TO_WORKER.decode(packed(data))


@pytest.mark.parametrize("number", [-1, 3, "0"])
def test_unknown_holders_are_rejected(number: Any) -> None:
    data = unpacked(packed(CALL))
    data["holders"]["rows"]["r"] = [0, number]
    with pytest.raises(msgspec.ValidationError):
        TO_WORKER.decode(packed(data))


def test_invalid_values_are_rejected() -> None:
    data = to_plain(PLAN)
    data["placements"]["a"]["layout"]["mesh"]["ranks"] = [0, 0]
    with pytest.raises(ValueError, match="distinct ranks"):
        from_plain(data, ExecutionPlan)
    data = to_plain(META)
    data["columns"]["r"]["lengths"] = [1]
    with pytest.raises(ValueError, match="column 'r' has 1 rows, the batch has 2"):
        from_plain(data, BatchMeta)
