"""Traffic equals that of the routes of a reallocation."""

from dataclasses import replace
from functools import partial
from itertools import product

import pytest

from realhf.api.batch_meta import PROMPT, BatchMeta, ColumnMeta, RowId
from realhf.api.layout import DeviceMesh, Layout, ParallelStrategy
from realhf.api.messages import Holders, PrepareCall
from realhf.api.model_config import ModelConfig
from realhf.arch.param_specs import param_specs, stage_layers
from realhf.plan.compile.realloc import plan_realloc
from realhf.plan.cost.speed import Traffic
from realhf.plan.cost.traffic import RING_BYTES, realloc_traffic, ring_bytes_of, traffic_of, transfer_traffic
from tests.plan.compile.test_realloc import CONFIG

ROUTED = replace(CONFIG, n_layers=2, n_experts=4, experts_per_token=2, expert_intermediate=8)
DIVIDED = ("d1", "d2e2", "d4e2", "t2e2", "t4e2", "d2t2e4", "d2p2e2", "d2", "t2", "d4z3")
STRATEGIES = (
    "d1",
    "d2",
    "d4",
    "t2",
    "t4",
    "p2",
    "p3",
    "d2t2",
    "t2p2",
    "d4z3",
    "d2t2z3",
    "d2p2z3",
    "c2",
    "d2c2",
    "c2p2",
)


def layout(text: str, start: int = 0) -> Layout:
    strategy = ParallelStrategy.parse(text)
    return Layout(DeviceMesh(tuple(range(start, start + strategy.world))), strategy)


PAIRS = [(CONFIG, *pair) for pair in product(STRATEGIES, STRATEGIES)]
PAIRS += [(ROUTED, *pair) for pair in product(DIVIDED, DIVIDED)]


@pytest.mark.parametrize("model, src, dst", PAIRS)
def test_traffic_equals_that_of_the_routes(model: ModelConfig, src: str, dst: str) -> None:
    for start in (0, 2, 4):
        here, there = layout(src), layout(dst, start)
        routes = plan_realloc(param_specs(model), partial(stage_layers, model), here, there, 4)
        expected = traffic_of(((r.src, r.dsts, r.numel * 4, len(r.parts)) for r in routes), 4)
        found = realloc_traffic(model, here, there, 4, 4)
        # chunks end at rows, which are a large part of a chunk in a model this small
        assert found.total == pytest.approx(expected.total, rel=0.15)
        assert found.copied == pytest.approx(expected.copied, rel=0.25)


def test_receivers_on_a_node_share_one_copy() -> None:
    assert traffic_of([(0, (1, 2), 100, 3)], node_size=4) == Traffic(node=100, n_parts=3, copied=100, total=300)
    assert traffic_of([(0, (1, 2), 100, 3)], node_size=1).cluster == 200
    assert traffic_of([(0, (0,), 100, 1)], node_size=1) == Traffic(local=100, n_parts=1, copied=200, total=200)
    assert traffic_of([], node_size=1) == Traffic()


def test_ring_bytes_are_bounded_by_ring_size() -> None:
    copies = [(0, (1, 2), 100, 3), (2, (1,), 30, 1), (0, (0,), 999, 1)]
    assert ring_bytes_of(copies, node_size=4) == 130  # worker 1 reads two rings
    assert ring_bytes_of(copies, node_size=1) == ring_bytes_of([], node_size=4) == 0
    assert ring_bytes_of([(0, (1,), 3 * RING_BYTES, 1), (1, (0,), 5, 1)], node_size=2) == RING_BYTES


def test_row_traffic_depends_on_dtype_and_length() -> None:
    ids = (RowId(0, PROMPT), RowId(1, PROMPT))
    meta = BatchMeta(ids, {"tokens": ColumnMeta("int64", (3, 5))})
    call = PrepareCall(0, "any", 0, 0, meta, Holders(((2,),), {"tokens": (0, 0)}), (), ((0,), (1,)), (0, 0), {})
    traffic = transfer_traffic(call, ("tokens",), layout("d2"), 4)
    assert traffic.node == 64 and traffic.total == 128
