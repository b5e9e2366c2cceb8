"""Programs compared with literals, and what workers derive from them."""

from realhf.api.execution_plan import ExecutionPlan, Placement
from realhf.api.graph import MFC, Graph, InterfaceSpec, Kind, Sync
from realhf.api.layout import DeviceMesh, Layout, ParallelStrategy
from realhf.api.program import Compute, Load, Offload, Reallocate, Release, Transfer
from realhf.plan.compile.program import (
    compile_program,
    home_layout,
    layout_ranks,
    process_groups,
    rank_engines,
    with_evaluation,
)

SPEC = InterfaceSpec("any")
PPO = Graph(
    (
        MFC("actor_gen", "actor", Kind.GENERATE, SPEC, ("prompts",), ("tokens",)),
        MFC("rew_inf", None, Kind.INFERENCE, SPEC, ("tokens", "row"), ("rewards",)),
        MFC("ref_inf", "ref", Kind.INFERENCE, SPEC, ("tokens",), ("ref_logprobs",)),
        MFC("actor_train", "actor", Kind.TRAIN, SPEC, ("tokens", "rewards", "ref_logprobs")),
    )
)


def layout(text: str, *ranks: int) -> Layout:
    return Layout(DeviceMesh(ranks), ParallelStrategy.parse(text))


WIDE, PAIR, ONE, TWO = layout("d2t2", 0, 1, 2, 3), layout("t2", 2, 3), layout("d1", 0), layout("d2", 0, 1)


def plan(**layouts: Layout) -> ExecutionPlan:
    return ExecutionPlan(4, {name: Placement(at) for name, at in layouts.items()})


DISJOINT = plan(actor_gen=TWO, rew_inf=ONE, ref_inf=PAIR, actor_train=TWO)
UNLIKE = plan(actor_gen=WIDE, rew_inf=ONE, ref_inf=PAIR, actor_train=PAIR)


def test_calls_in_the_home_layout_transfer_rows_and_compute() -> None:
    assert compile_program(PPO, DISJOINT) == {
        "actor_gen": (Transfer(("prompts",), TWO), Compute("actor_gen", "actor", TWO)),
        "rew_inf": (Transfer(("tokens", "row"), ONE), Compute("rew_inf", None, ONE)),
        "ref_inf": (Transfer(("tokens",), PAIR), Compute("ref_inf", "ref", PAIR)),
        "actor_train": (
            Transfer(("tokens", "rewards", "ref_logprobs"), TWO),
            Compute("actor_train", "actor", TWO),
        ),
    }


def test_calls_in_other_layouts_reallocate_and_release() -> None:
    program = compile_program(PPO, UNLIKE)
    assert program["actor_gen"] == (
        Transfer(("prompts",), WIDE),
        Reallocate("actor", PAIR, "actor", WIDE),
        Compute("actor_gen", "actor", WIDE),
        Release("actor", WIDE),
    )
    assert [type(step) for step in program["actor_train"]] == [Transfer, Compute]


def test_home_is_the_layout_of_the_trainer_or_the_first_call() -> None:
    assert home_layout(PPO, UNLIKE, "actor") == PAIR and home_layout(PPO, UNLIKE, "ref") == PAIR
    twice = Graph((*PPO.mfcs, MFC("ref_again", "ref", Kind.INFERENCE, SPEC, ("tokens",), ("again",))))
    other = ExecutionPlan(4, {**UNLIKE.placements, "ref_again": Placement(ONE)})
    assert home_layout(twice, other, "ref") == PAIR
    assert compile_program(twice, other)["ref_again"][1] == Reallocate("ref", PAIR, "ref", ONE)


def test_engines_of_a_rank() -> None:
    program = compile_program(PPO, UNLIKE)
    assert rank_engines(program, 0) == (("actor", WIDE),)
    assert rank_engines(program, 3) == (("actor", PAIR), ("actor", WIDE), ("ref", PAIR))
    assert rank_engines(compile_program(PPO, DISJOINT), 2) == (("ref", PAIR),)
    assert rank_engines(compile_program(PPO, DISJOINT), 7) == ()


def test_process_groups() -> None:
    assert process_groups(compile_program(PPO, UNLIKE)) == ((0, 2), (1, 3), (0, 1), (2, 3))
    assert process_groups(compile_program(PPO, DISJOINT)) == ((0, 1), (2, 3))
    assert process_groups(compile_program(PPO, plan(**dict.fromkeys([m.name for m in PPO.mfcs], ONE)))) == ()


def test_layout_ranks() -> None:
    program = compile_program(PPO, plan(actor_gen=TWO, rew_inf=ONE, ref_inf=PAIR, actor_train=PAIR))
    assert {name: set(layout_ranks(steps)) for name, steps in program.items()} == {
        "actor_gen": {0, 1, 2, 3},
        "rew_inf": {0},
        "ref_inf": {2, 3},
        "actor_train": {2, 3},
    }


def test_an_ema_role_is_updated_after_training() -> None:
    graph = Graph(PPO.mfcs, (Sync("actor_train", "actor", "ref", 0.25),))
    program = compile_program(graph, DISJOINT)
    assert program["actor_train"][-1] == Reallocate("actor", TWO, "ref", PAIR, 0.25)
    assert graph.updater("ref") is graph["actor_train"] and PPO.updater("ref") is None
    assert layout_ranks(program["actor_train"]) == {0, 1, 2, 3}
    assert rank_engines(program, 2) == (("ref", PAIR),)


def test_an_idle_role_rests_in_host_memory() -> None:
    program = compile_program(Graph(PPO.mfcs, offloaded=("ref",)), DISJOINT)
    assert program["ref_inf"][1] == Load("ref", PAIR) and program["ref_inf"][-1] == Offload("ref", PAIR)
    assert not any(isinstance(step, Load) for step in program["actor_gen"])


def test_evaluation_runs_in_home_layouts() -> None:
    evaluation = (
        MFC("eval_gen", "actor", Kind.GENERATE, SPEC, ("prompts",), ("tokens",)),
        MFC("eval_ref", "ref", Kind.INFERENCE, SPEC, ("tokens",), ("ref_logprobs",)),
        MFC("eval_rew", None, Kind.INFERENCE, SPEC, ("tokens", "row"), ("rewards",)),
    )
    graph = Graph(PPO.mfcs, evaluation=evaluation)
    assert compile_program(graph, UNLIKE) == compile_program(PPO, UNLIKE)  # evaluation calls have no placement
    placed = with_evaluation(graph, UNLIKE)
    assert placed.placements == {**UNLIKE.placements, "eval_gen": Placement(PAIR), "eval_ref": Placement(PAIR),
                                 "eval_rew": Placement(ONE)}  # fmt: skip
    program = compile_program(graph, placed)
    assert program["eval_gen"] == (Transfer(("prompts",), PAIR), Compute("eval_gen", "actor", PAIR))
    assert program["eval_rew"][1] == Compute("eval_rew", None, ONE)
