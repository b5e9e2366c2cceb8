"""What a choice comes to, in Python, in C++ and with the real master."""

from dataclasses import replace
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from realhf.api.graph import MFC, Graph, InterfaceSpec, Kind
from realhf.api.machine import Cost
from realhf.plan.search.cpp_evaluator import evaluator
from realhf.plan.search.evaluate import OOM_PENALTY, evaluate, objective
from realhf.plan.search.problem import LayoutOption, Problem, ReallocCost
from tests.plan.search.instances import random_instance

SPEC = InterfaceSpec("any")
GENERATE = MFC("gen", "actor", Kind.GENERATE, SPEC, ("prompts",), ("tokens",), 4)
JUDGE = MFC("judge", "rew", Kind.INFERENCE, SPEC, ("tokens",), ("rewards",), 4)
TRAIN = MFC("train", "actor", Kind.TRAIN, SPEC, ("tokens", "rewards"), (), 4)
GRAPH = Graph((GENERATE, JUDGE, TRAIN))


def option(start: int, stop: int, seconds: float, transient: float = 0.0, resident: float = 0.0) -> LayoutOption:
    ranks, rows, load, offload = range(start, stop), Cost(0.25, 0.0), Cost(1.0, 0.0), Cost(2.0, 0.0)
    return LayoutOption(ranks, ranks, Cost(seconds, seconds), rows, transient, resident, load, offload)


def problem_of(graph: Graph = GRAPH, **changes: Any) -> Problem:
    """Two workers; the actor generates on both and is at home on the first, the judge is on the second."""
    options = {
        "gen": [option(0, 2, 4.0, transient=10.0), option(0, 1, 6.0)],
        "judge": [option(1, 2, 1.0, transient=3.0, resident=5.0)],
        "train": [option(0, 1, 2.0, transient=6.0, resident=20.0)],
    }
    known = Problem(
        graph, options, 2, 4, 100.0, lambda mfc, o, home: ReallocCost(Cost(0.5, 0), 4.0) if o == 0 else ReallocCost()
    )
    return replace(known, **changes)


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 1 << 30))
def test_the_twins_and_the_real_master_agree(seed: int) -> None:
    instance = random_instance(seed, tight=seed % 2 == 0)
    problem = instance.problem
    fast, random = evaluator(problem), Random(seed)
    for _ in range(3):
        choice = tuple(random.randrange(len(options)) for options in problem.table)
        seconds, peak = evaluate(problem, choice)
        assert fast.evaluate(choice) == (seconds, peak)
        assert instance.simulate(choice).seconds_per_step == pytest.approx(seconds, rel=1e-9, abs=1e-12)


def test_a_step_is_its_calls_one_after_the_other() -> None:
    # transfer, move, generate; transfer, judge; transfer, train
    assert evaluate(problem_of(), (0, 0, 0))[0] == 0.25 + 0.5 + 4 + 0.25 + 1 + 0.25 + 2
    assert evaluate(problem_of(), (1, 0, 0))[0] == 0.25 + 6 + 0.25 + 1 + 0.25 + 2
    assert evaluate(problem_of(call_seconds=0.125), (1, 0, 0))[0] == 9.75 + 3 * 0.125


def test_stale_weights_let_calls_of_two_steps_overlap() -> None:
    # the judge works while the next prompts are answered; training shares the generator's worker
    on_time, late = (evaluate(problem_of(max_staleness=s, n_steps=9), (1, 0, 0))[0] for s in (0, 1))
    assert late == 0.25 + 0.25 + 6 + 0.25 + 2 < on_time  # the judge takes its rows between two calls


def test_resting_weights_come_and_go_with_every_call() -> None:
    graph = Graph(GRAPH.mfcs, offloaded=("rew",))
    assert evaluate(problem_of(graph), (1, 0, 0)) == (9.75 + 1 + 2, 20 + 6)
    assert evaluate(problem_of(graph, capacity=10.0), (0, 0, 0))[1] == 20 + 10 + 4


def test_the_fullest_worker_holds_what_is_at_home_and_one_call() -> None:
    assert evaluate(problem_of(), (0, 0, 0))[1] == 20 + 10 + 4  # the first: actor, generation and its copy
    assert evaluate(problem_of(), (1, 0, 0))[1] == 20 + 6  # the first: actor and its training


def test_what_fits_beats_what_does_not_and_less_is_better() -> None:
    problem = problem_of(capacity=10.0)
    fits, slow = objective(problem, 1.0, 10.0), objective(problem, 9e9, 9.0)
    little, much = objective(problem, 1.0, 10.1), objective(problem, 0.1, 12.0)
    assert fits == 1.0 and fits < slow < OOM_PENALTY <= little < much
