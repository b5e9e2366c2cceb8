"""The planner in C++: as Python has it, to the last bit, also where a table fails."""

import importlib.util
import shutil
from dataclasses import replace
from math import inf
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from realhf.plan.search import cpp_evaluator
from realhf.plan.search.cpp_evaluator import MAX_MFCS, CppEvaluator, evaluator, load_library
from realhf.plan.search.mcmc import Chain, PythonEvaluator, SplitMix64
from realhf.plan.search.problem import ReallocCost
from tests.plan.search.instances import random_instance
from tests.plan.search.test_evaluate import problem_of

built = pytest.mark.skipif(load_library() is None, reason="PLANNER NOT BUILT: python setup.py build_ext --inplace")


@built
@settings(max_examples=50, deadline=None)
@given(st.integers(0, 1 << 30), st.floats(0.001, 1.0))
def test_chains_take_the_same_steps_in_both(seed: int, temperature: float) -> None:
    problem = random_instance(seed, tight=seed % 2 == 0).problem
    start = tuple(0 for _ in problem.table)
    walkers = [Chain.start(SplitMix64(seed), start, 1e9) for _ in range(2)]
    for walker, players in zip(walkers, (PythonEvaluator(problem), evaluator(problem)), strict=True):
        for n in (1, 0, 30):
            players.run_chain(walker, n, temperature)
    assert walkers[0] == walkers[1]


@built
def test_an_error_of_a_table_is_raised_and_forgotten() -> None:
    failing = True

    def move(mfc: str, option: int, home: int) -> ReallocCost:
        if failing:
            raise ValueError(f"no way for {mfc}")
        return ReallocCost()

    fast = evaluator(replace(problem_of(), realloc=move))
    walker = Chain.start(SplitMix64(1), (0, 0, 0), inf)
    for action in (lambda: fast.evaluate((0, 0, 0)), lambda: fast.run_chain(walker, 5, 0.1)):
        with pytest.raises(ValueError, match="no way for gen"):
            action()
    failing = False
    assert fast.evaluate((0, 0, 0))[0] == 7.75


@built
def test_the_largest_graph_cuts_the_ranks_into_as_many_pieces_as_it_can() -> None:
    instance = random_instance(3, n_mfcs=MAX_MFCS, n_ranks=200)
    choice = tuple(0 for _ in instance.problem.table)
    fast = evaluator(instance.problem)
    assert isinstance(fast, CppEvaluator)
    assert fast.evaluate(choice) == PythonEvaluator(instance.problem).evaluate(choice)


def test_larger_graphs_are_for_python() -> None:
    assert isinstance(evaluator(random_instance(3, n_mfcs=MAX_MFCS + 1).problem), PythonEvaluator)


def elsewhere(folder: Path) -> ModuleType:
    """Load the loader as it is where ``folder`` holds the package's plan/."""
    shutil.copy(cpp_evaluator.__file__, folder)
    spec = importlib.util.spec_from_file_location("native_elsewhere", folder / "cpp_evaluator.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_without_the_library_python_answers(tmp_path: Path) -> None:
    assert isinstance(elsewhere(tmp_path).evaluator(problem_of()), PythonEvaluator)


def test_a_library_that_does_not_load_is_reported_once(tmp_path: Path) -> None:
    (tmp_path / "_planner.so").write_bytes(b"not a library")
    module = elsewhere(tmp_path)
    with pytest.warns(UserWarning, match="_planner.so does not load and plans are searched in Python") as reports:
        assert all(isinstance(module.evaluator(problem_of()), PythonEvaluator) for _ in range(2))
    assert len(reports) == 1
