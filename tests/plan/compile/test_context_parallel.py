"""Strategies that divide rows: notation, options, and what calls can have."""

from dataclasses import replace

import pytest

from realhf.api.config import ModelSpec, ParallelConfig
from realhf.api.config.choices import Backend
from realhf.api.experiment import RoleSpec
from realhf.api.graph import Kind
from realhf.api.layout import DeviceMesh, Layout, ParallelStrategy
from realhf.plan.compile.allocate import _as_options, _degrees
from realhf.plan.compile.call_degrees import context_problem, of_call
from realhf.plan.compile.check import nearest_strategy, strategy_problems
from realhf.plan.cost.speed import Work
from tests.plan.compile.test_expert_parallel import call
from tests.plan.compile.test_realloc import CONFIG

parse = ParallelStrategy.parse


def test_notation() -> None:
    assert parse("d2c4p1") == parse("c4d2") == ParallelStrategy(2, 4, 1, context=True)
    assert str(parse("d2c4")) == "d2c4p1" and parse("d4c1") == parse("d4")
    with pytest.raises(ValueError, match="twice .c replaces t."):
        parse("d2t2c2")
    for text in ("c4e2", "d2c2z3"):
        with pytest.raises(ValueError, match="without e and z3"):
            parse(text)


def test_weights_are_whole_on_every_rank() -> None:
    layout = Layout(DeviceMesh((4, 2, 0, 6, 1, 3, 5, 7)), parse("d2c2p2"))
    assert layout.strategy.n_replicas == layout.strategy.weight_dp == 4 and layout.strategy.n_shards == 1
    assert (
        layout.axis("replicas", 2) == (4, 2, 0, 6) and layout.axis("dp", 2) == (2, 6) and layout.axis("tp", 2) == (4, 2)
    )
    assert [rank for rank in layout.mesh.ranks if layout.has_first_copy(rank)] == [4, 1]
    assert strategy_problems(CONFIG, parse("c3")) == [] != strategy_problems(CONFIG, parse("t3"))
    assert nearest_strategy(parse("c4"), 3, [CONFIG]) == parse("c3")


def test_what_calls_can_have() -> None:
    generate, train, infer = (call(kind) for kind in (Kind.GENERATE, Kind.TRAIN, Kind.INFERENCE))
    role = lambda **options: RoleSpec(ModelSpec(**options))
    assert "nearest legal: d2t2p1" in context_problem(generate, parse("d2c2"), role())
    assert of_call(generate, parse("d2c2"), CONFIG) == parse("d2t2")
    assert of_call(train, parse("d2c2"), CONFIG) == parse("d2c2")
    for options in ({"zero_stage": 3}, {"zero_stage": 2}, {"backend": Backend.megatron}):
        assert "requires actor." in context_problem(train, parse("c2"), role(**options))
        assert context_problem(infer, parse("c2"), role(**options)) == ""
    assert context_problem(train, parse("c2"), role()) == context_problem(train, parse("t2"), role()) == ""


def test_options() -> None:
    assert _degrees(ParallelConfig(2, context_parallel_size=4)) == (parse("d2c4"), "")
    assert _degrees(ParallelConfig(2, 2, context_parallel_size=4))[1].startswith("context_parallel_size=4 replaces")
    assert _degrees(ParallelConfig(2, 2, 1, 4)) == (parse("d2t2e4"), "")
    assert _degrees(ParallelConfig(1, 1, 2, 1, 2, 2)) == (parse("c2p2v2"), "")
    assert _degrees(ParallelConfig(virtual_pipeline_parallel_size=2))[1].endswith("of at least 2")
    assert _degrees(ParallelConfig(2, 2, 1, 3)) == (parse("d2t2e2"), "expert_parallel_size=3 is none of 1, 2, 4")
    assert _degrees(ParallelConfig(2, 0))[1] == "parallel degrees must be positive, got d2t0p1"
    options = _as_options("ref_inf", ParallelConfig(), parse("d2c4"))
    assert options == "ref_inf.parallel.data_parallel_size=2 ref_inf.parallel.context_parallel_size=4"


def test_work_is_divided() -> None:
    work = Work.of([100, 28], predicted=101)
    share = work.divided(4)
    assert (share.tokens, share.predicted) == (32, 26) and share.pairs == pytest.approx(work.pairs / 4, abs=1)
    assert replace(parse("c4"), context=False) == parse("t4")
