"""The Python and C++ evaluators, compared with each other and with a simulation of the master."""

from dataclasses import replace
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from realhf.api.graph import MFC, Graph, InterfaceSpec, Kind
from realhf.api.machine import Cost
from realhf.plan.search.cpp_evaluator import evaluator
from realhf.plan.search.evaluate import OOM_PENALTY, PythonEvaluator, objective
from realhf.plan.search.problem import LayoutOption, Problem, ReallocCost
from tests.plan.search.instances import random_instance
from tests.scaling import examples

SPEC = InterfaceSpec("any")
GENERATE = MFC("gen", "actor", Kind.GENERATE, SPEC, ("prompts",), ("tokens",), 4)
REWARD = MFC("reward", "rew", Kind.INFERENCE, SPEC, ("tokens",), ("rewards",), 4)
TRAIN = MFC("train", "actor", Kind.TRAIN, SPEC, ("tokens", "rewards"), (), 4)
GRAPH = Graph((GENERATE, REWARD, TRAIN))


def option(start: int, stop: int, seconds: float, transient: float = 0.0, resident: float = 0.0) -> LayoutOption:
    ranks, rows, load, offload = range(start, stop), Cost(0.25, 0.0), Cost(1.0, 0.0), Cost(2.0, 0.0)
    return LayoutOption(ranks, ranks, (Cost(seconds, seconds),), rows, transient, resident, load, offload)


def problem_of(graph: Graph = GRAPH, **changes: Any) -> Problem:
    """Two workers: the actor generates on both and has its home on the first, the reward model is on the second."""
    options = {
        "gen": [option(0, 2, 4.0, transient=10.0), option(0, 1, 6.0)],
        "reward": [option(1, 2, 1.0, transient=3.0, resident=5.0)],
        "train": [option(0, 1, 2.0, transient=6.0, resident=20.0)],
    }
    known = Problem(
        graph, options, 2, 4, 100.0, lambda mfc, o, home: ReallocCost(Cost(0.5, 0), 4.0) if o == 0 else ReallocCost()
    )
    return replace(known, **changes)


def evaluate(problem: Problem, choice: tuple[int, ...]) -> tuple[float, float]:
    return PythonEvaluator(problem).evaluate(choice)


@settings(max_examples=examples(150))
@given(st.integers(0, 1 << 30))
def test_evaluators_and_master_agree(seed: int) -> None:
    instance = random_instance(seed, tight=seed % 2 == 0)
    problem = instance.problem
    python, cpp, random = PythonEvaluator(problem), evaluator(problem), Random(seed)
    for _ in range(3):
        choice = tuple(random.randrange(len(options)) for options in problem.table)
        seconds, peak = python.evaluate(choice)
        assert cpp.evaluate(choice) == (seconds, peak)
        assert instance.simulate(choice).seconds_per_step == pytest.approx(seconds, rel=1e-9, abs=1e-12)


def test_sequential_calls_add_up() -> None:
    # transfer, move, generate; transfer, judge; transfer, train
    assert evaluate(problem_of(), (0, 0, 0))[0] == 0.25 + 0.5 + 4 + 0.25 + 1 + 0.25 + 2
    assert evaluate(problem_of(), (1, 0, 0))[0] == 0.25 + 6 + 0.25 + 1 + 0.25 + 2
    assert evaluate(problem_of(call_seconds=0.125), (1, 0, 0))[0] == 9.75 + 3 * 0.125


def test_staleness_overlaps_calls_of_two_steps() -> None:
    # the reward model runs during the next generation; training shares the worker of generation
    on_time, late = (evaluate(problem_of(max_staleness=s, n_steps=9), (1, 0, 0))[0] for s in (0, 1))
    assert (
        late == 0.25 + 0.25 + 6 + 0.25 + 2 < on_time
    )  # the row transfer of the reward model waits for the worker of generation


def test_offloaded_weights_are_loaded_for_every_call() -> None:
    graph = Graph(GRAPH.mfcs, offloaded=("rew",))
    assert evaluate(problem_of(graph), (1, 0, 0)) == (9.75 + 1 + 2, 20 + 6)
    assert evaluate(problem_of(graph, capacity=10.0), (0, 0, 0))[1] == 20 + 10 + 4


def test_peak_is_resident_weights_and_the_largest_call() -> None:
    assert evaluate(problem_of(), (0, 0, 0))[1] == 20 + 10 + 4  # rank 0: actor, generation and its copy of the weights
    assert evaluate(problem_of(), (1, 0, 0))[1] == 20 + 6  # rank 0: actor and its training


def test_plans_that_fit_are_better_and_less_excess_is_better() -> None:
    problem = problem_of(capacity=10.0)
    fits, slow = objective(problem, 1.0, 10.0), objective(problem, 9e9, 9.0)
    little, much = objective(problem, 1.0, 10.1), objective(problem, 0.1, 12.0)
    assert fits == 1.0 and fits < slow < OOM_PENALTY <= little < much
