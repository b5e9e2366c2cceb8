"""Allocations with several chunks of layers per pipeline stage: modes, options, refusals, evaluation."""

from dataclasses import replace

import pytest

from realhf.api.codec import from_plain, to_plain
from realhf.api.config import MFCConfig, ParallelConfig
from realhf.api.execution_plan import ExecutionPlan, Placement
from realhf.api.graph import MFC, Graph, InterfaceSpec, Kind
from realhf.api.layout import Layout, ParallelStrategy
from realhf.plan.compile.call_degrees import chunk_layouts, chunk_problem, of_call
from realhf.plan.compile.check import contiguous_mesh, nearest_strategy, strategy_problems
from realhf.plan.compile.program import with_evaluation
from tests.plan.compile.test_allocate import ACTOR as SHALLOW
from tests.plan.compile.test_allocate import layouts, plan, problems

ACTOR = replace(SHALLOW, n_layers=4)
parse = ParallelStrategy.parse


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("d2p2v2", ["d2t1p2@0-3", "d2t1p2v2@0-3"]),
        ("V2D2P2", ["d2t1p2@0-3", "d2t1p2v2@0-3"]),
        ("actor_gen:t2,*:p2v2", ["d1t2p1@0-1", "d1t1p2v2@0-1"]),
        ("actor_gen:d1,actor_train:p2v2@2-3", ["d1t1p1@0", "d1t1p2v2@2-3"]),
    ],
)
def test_generation_has_one_chunk_where_a_strategy_is_for_all_calls(mode: str, expected: list[str]) -> None:
    assert layouts(plan(mode, model=ACTOR)) == expected


def test_generation_with_chunks_is_refused_by_name() -> None:
    (problem,) = problems("actor_gen:p2v2,*:p2v2", model=ACTOR)
    assert "actor_gen: d1t1p2v2: a token of generation passes" in problem and problem.endswith("nearest legal: d1t1p2")


def test_options_of_manual_layouts() -> None:
    train = MFCConfig(parallel=ParallelConfig(2, 1, 2, 1, 1, 2))
    assert layouts(plan("manual", actor_train=train, actor_gen=MFCConfig("0"), model=ACTOR))[1] == "d2t1p2v2@0-3"
    for parallel, message in (
        (ParallelConfig(4, 1, 1, 1, 1, 2), "virtual_pipeline_parallel_size=2 needs pipeline_parallel_size of at least"),
        (ParallelConfig(2, 1, 2, 1, 1, 0), "parallel degrees must be positive, got d2t1p2v0"),
        (ParallelConfig(2, 1, 2, 1, 1, 3), "4 layers are fewer than 2 pipeline stages of 3 chunks; nearest legal: "
                                        "actor_train.parallel.virtual_pipeline_parallel_size=2"),
    ):  # fmt: skip
        option = MFCConfig(parallel=parallel)
        (problem,) = problems("manual", actor_train=option, actor_gen=MFCConfig("0"), model=ACTOR)
        assert message in problem


def test_chunks_need_as_many_layers() -> None:
    assert strategy_problems(ACTOR, parse("p2v2")) == strategy_problems(ACTOR, parse("p4")) == []
    assert strategy_problems(ACTOR, parse("p2v3")) == ["4 layers are fewer than 2 pipeline stages of 3 chunks"]
    assert nearest_strategy(parse("p2v5"), 2, [ACTOR]) == parse("p2v2")
    assert nearest_strategy(parse("d3p2v2"), 6, [SHALLOW]) == parse("d3p2")
    assert nearest_strategy(parse("p2"), 2, [ACTOR]) == parse("p2")


def test_calls() -> None:
    spec = InterfaceSpec("any")
    train, infer = MFC("train", "actor", Kind.TRAIN, spec, ("tokens",)), MFC("inf", "actor", Kind.INFERENCE, spec, ())
    generate, reward = replace(train, name="gen", kind=Kind.GENERATE), replace(infer, name="rew", role=None)
    several = parse("d2p2v2")
    assert [of_call(mfc, several, None).vpp for mfc in (train, infer, generate, reward)] == [2, 2, 1, 1]
    assert [bool(chunk_problem(mfc, several)) for mfc in (train, infer, generate, reward)] == [
        False,
        False,
        True,
        False,
    ]
    assert not chunk_problem(generate, parse("d2p2"))


def test_the_planner_considers_two_chunks_in_training() -> None:
    spec = InterfaceSpec("any")
    train, infer = MFC("train", "actor", Kind.TRAIN, spec, ("tokens",)), MFC("inf", "actor", Kind.INFERENCE, spec, ())
    found = lambda mfc, text, model=ACTOR: [
        str(one.strategy) for one in chunk_layouts(mfc, Layout(contiguous_mesh(parse(text).world), parse(text)), model)
    ]
    assert found(train, "d2p2") == ["d2t1p2", "d2t1p2v2"] and found(train, "d2p2z3") == ["d2t1p2z3", "d2t1p2v2z3"]
    assert found(infer, "d2p2") == ["d2t1p2"] and found(train, "d4") == ["d4t1p1"]
    assert found(train, "p2", SHALLOW) == found(train, "p2", None) == ["d1t1p2"]


def test_evaluation_generates_with_one_chunk() -> None:
    spec = InterfaceSpec("any")
    train = MFC("actor_train", "actor", Kind.TRAIN, spec, ("tokens",), ())
    evaluation = (
        MFC("eval_gen", "actor", Kind.GENERATE, spec, ("prompts",), ("tokens",)),
        MFC("eval_inf", "actor", Kind.INFERENCE, spec, ("tokens",), ("loss",)),
    )
    graph = replace(Graph((train,)), evaluation=evaluation)
    for text, expected in (("d2p2v2", "d2p2"), ("d2p2v2z3", "d2p2"), ("d2t2p2v2e4", "d2t2p2e2"), ("d4e2", "d4")):
        home = Layout(contiguous_mesh(parse(text).world), parse(text))
        placed = with_evaluation(graph, ExecutionPlan(8, {"actor_train": Placement(home)}))
        assert placed["eval_gen"].layout.strategy == parse(expected) and placed["eval_inf"].layout == home


def test_plans_without_the_field_have_one_chunk() -> None:
    made = plan("d4")
    text = to_plain(made)
    del text["placements"]["actor_gen"]["layout"]["strategy"]["vpp"]
    assert from_plain(text, ExecutionPlan) == made
    several = plan("d2p2v2", model=ACTOR)
    assert from_plain(to_plain(several), ExecutionPlan) == several
