"""Which layouts a model allows."""

import pytest

from realhf.api.graph import MFC, Graph, InterfaceSpec, Kind
from realhf.api.layout import DeviceMesh, Layout, ParallelStrategy
from realhf.api.model import ModelConfig
from realhf.api.plan import ExecutionPlan, Placement
from realhf.plan.check import plan_problems, strategy_problems

MODEL = ModelConfig("llama", n_layers=3, hidden=24, n_heads=6, n_kv_heads=2, head_dim=4, intermediate=40, vocab=11,
                    max_positions=64)  # fmt: skip


@pytest.mark.parametrize("text", ["d1", "t2", "t6", "p3", "d5t2p3"])
def test_legal(text: str) -> None:
    assert strategy_problems(MODEL, ParallelStrategy.parse(text)) == []


def test_heads_that_cannot_be_cut_name_the_nearest_degree() -> None:
    assert strategy_problems(MODEL, ParallelStrategy(tp=4)) == [
        "6 heads (2 for keys and values) cannot be cut 4 ways; the nearest legal degree is t2"
    ]
    assert "t2" in strategy_problems(MODEL, ParallelStrategy(tp=3))[0]  # query heads would leave their key head


def test_more_stages_than_layers() -> None:
    assert strategy_problems(MODEL, ParallelStrategy(pp=4)) == ["3 layers cannot be cut into 4 stages; at most p3"]


def test_every_call_is_named() -> None:
    calls = tuple(MFC(n, "actor", Kind.INFERENCE, InterfaceSpec("any"), ("prompts",), (n,)) for n in ("a", "b"))
    quarter = Placement(Layout(DeviceMesh((0, 1, 2, 3)), ParallelStrategy(tp=4)))
    plan = ExecutionPlan(4, {"a": quarter, "b": quarter})
    found = plan_problems(Graph(calls), plan, {"actor": MODEL})
    assert [line.split(":")[0] for line in found] == ["a", "b"] and all("d1t4p1" in line for line in found)
    assert plan_problems(Graph(calls), plan, {}) == []
