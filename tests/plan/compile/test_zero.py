"""Calls that have ZeRO-3 layouts, and programs with them."""

from dataclasses import replace

from realhf.api.config import ModelSpec
from realhf.api.execution_plan import ExecutionPlan, Placement
from realhf.api.graph import MFC, Graph, InterfaceSpec, Kind
from realhf.api.layout import Layout
from realhf.api.program import Compute, Reallocate, Release
from realhf.experiments.ppo import PPOExperiment
from realhf.plan.compile.program import compile_program, with_evaluation
from realhf.plan.compile.zero import with_zero3, zero3_layout, zero3_layouts
from tests.plan.search.planners import layout


def ppo(zero_stage: int | str = 3, rank: int = 0) -> tuple[Graph, dict]:
    experiment = PPOExperiment()
    for role in ("actor", "critic", "ref", "rew"):
        setattr(experiment, role, ModelSpec(config="-", init_from_scratch=True))
    experiment.actor.zero_stage, experiment.actor.lora.rank = zero_stage, rank
    return experiment.graph(), experiment.roles()


def strategies(text: str, zero_stage: int | str, rank: int = 0) -> dict[str, str]:
    graph, roles = ppo(zero_stage, rank)
    plan = ExecutionPlan(2, {m.name: Placement(layout(text)) for m in graph.mfcs})
    return {
        name: str(placement.layout.strategy) for name, placement in with_zero3(plan, graph, roles).placements.items()
    }


def test_the_option_shards_training_and_nothing_else() -> None:
    found = strategies("d2", 3)
    assert {name for name, text in found.items() if text == "d2t1p1z3"} == {"actor_train"}
    assert set(strategies("d2", 2).values()) == {"d2t1p1"} and set(strategies("t2", 3).values()) == {"d1t2p1"}


def test_the_planner_chooses_for_training_calls_only() -> None:
    graph, roles = ppo("auto")

    def choices(call: str, text: str, roles: dict = roles) -> list[str]:
        return [str(found.strategy) for found in zero3_layouts(graph[call], layout(text), roles)]

    assert choices("actor_train", "d2") == ["d2t1p1", "d2t1p1z3"] and choices("actor_train", "t2") == ["d1t2p1"]
    assert choices("actor_gen", "d2") == choices("ref_inf", "d2") == ["d2t1p1"]
    assert choices("critic_train", "d2") == ["d2t1p1"], "its option is 1"
    assert choices("actor_train", "d2", ppo("auto", rank=4)[1]) == ["d2t1p1"], "frozen weights are not sharded"
    assert choices("actor_train", "d2", ppo(3)[1]) == ["d2t1p1z3"]


def test_a_given_layout_is_the_choice() -> None:
    assert set(strategies("d2", "auto").values()) == {"d2t1p1"}
    assert strategies("d2z3", "auto")["actor_train"] == "d2t1p1z3"
    role = ppo("auto")[1]["actor"]
    assert [role.zero_stage(layout(text).strategy) for text in ("d2", "d2z3", "t2")] == [1, 3, 1]


def test_forward_passes_may_be_sharded_and_generation_is_not() -> None:
    found = strategies("d2z3", 1)
    assert {name for name, text in found.items() if text == "d2t1p1"} == {"actor_gen"}
    assert found["ref_inf"] == found["critic_train"] == "d2t1p1z3"
    adapted = strategies("d2z3", 1, rank=4)
    assert adapted["actor_train"] == "d2t1p1" and adapted["critic_train"] == "d2t1p1z3"


def test_generation_gets_whole_weights_by_reallocation() -> None:
    graph, roles = ppo()
    plan = with_zero3(ExecutionPlan(2, {m.name: Placement(layout("d2")) for m in graph.mfcs}), graph, roles)
    program, home, whole = compile_program(graph, plan), layout("d2z3"), layout("d2")
    assert program["actor_gen"][1:] == (
        Reallocate("actor", home, "actor", whole), Compute("actor_gen", "actor", whole), Release("actor", whole)
    )  # fmt: skip
    assert program["actor_train"][1] == Compute("actor_train", "actor", home)


def test_evaluation_generates_with_whole_weights() -> None:
    train = MFC("actor_train", "actor", Kind.TRAIN, InterfaceSpec("sft"), ("tokens",), ())
    evaluation = (
        MFC("eval_gen", "actor", Kind.GENERATE, InterfaceSpec("generation"), ("prompts",), ("tokens",)),
        MFC("eval_inf", "actor", Kind.INFERENCE, InterfaceSpec("sft"), ("tokens",), ("loss",)),
    )
    graph = replace(Graph((train,)), evaluation=evaluation)
    plan = with_evaluation(graph, ExecutionPlan(2, {"actor_train": Placement(layout("d2z3"))}))
    assert plan["eval_gen"].layout == layout("d2") and plan["eval_inf"].layout == layout("d2z3")


def test_calls_without_a_model_are_never_sharded() -> None:
    graph, roles = ppo()
    mfc = replace(graph["actor_train"], role=None, kind=Kind.INFERENCE)
    assert zero3_layout(mfc, layout("d2z3"), roles) == Layout(layout("d2").mesh, layout("d2").strategy)
