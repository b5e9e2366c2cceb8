"""The C++ evaluator: bitwise equal to the Python evaluator, including errors in cost tables."""

import importlib.util
from dataclasses import replace
from math import inf
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from realhf.base import native
from realhf.plan.search import cpp_evaluator
from realhf.plan.search.cpp_evaluator import MAX_MFCS, CppEvaluator, evaluator, load_library
from realhf.plan.search.evaluate import PythonEvaluator
from realhf.plan.search.mcmc import Chain, SplitMix64
from realhf.plan.search.problem import ReallocCost
from tests.plan.search.instances import random_instance
from tests.plan.search.test_evaluate import problem_of
from tests.scaling import examples

built = pytest.mark.skipif(load_library() is None, reason="PLANNER NOT BUILT: python setup.py build_ext --inplace")


@built
@settings(max_examples=examples(50))
@given(st.integers(0, 1 << 30), st.floats(0.001, 1.0))
def test_chains_are_equal(seed: int, temperature: float) -> None:
    problem = random_instance(seed, tight=seed % 2 == 0).problem
    start = tuple(0 for _ in problem.table)
    chains = [Chain.start(SplitMix64(seed), start, 1e9) for _ in range(2)]
    for chain, plans in zip(chains, (PythonEvaluator(problem), evaluator(problem)), strict=True):
        for n in (1, 0, 30):
            plans.run_chain(chain, n, temperature)
    assert chains[0] == chains[1]


@built
def test_an_error_in_a_cost_table_is_raised_once() -> None:
    failing = True

    def realloc(mfc: str, option: int, home: int) -> ReallocCost:
        if failing:
            raise ValueError(f"no route for {mfc}")
        return ReallocCost()

    cpp = evaluator(replace(problem_of(), realloc=realloc))
    chain = Chain.start(SplitMix64(1), (0, 0, 0), inf)
    for action in (lambda: cpp.evaluate((0, 0, 0)), lambda: cpp.run_chain(chain, 5, 0.1)):
        with pytest.raises(ValueError, match="no route for gen"):
            action()
    failing = False
    assert cpp.evaluate((0, 0, 0))[0] == 7.75


@built
def test_largest_graph_with_the_most_rank_classes() -> None:
    instance = random_instance(3, n_mfcs=MAX_MFCS, n_ranks=200)
    choice = tuple(0 for _ in instance.problem.table)
    cpp = evaluator(instance.problem)
    assert isinstance(cpp, CppEvaluator)
    assert cpp.evaluate(choice) == PythonEvaluator(instance.problem).evaluate(choice)


def test_larger_graphs_use_python() -> None:
    assert isinstance(evaluator(random_instance(3, n_mfcs=MAX_MFCS + 1).problem), PythonEvaluator)


def copy_of_module(library: Path | None, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Import a copy of the module that finds ``library``."""
    monkeypatch.setattr(native, "ensure", lambda _: library)
    spec = importlib.util.spec_from_file_location("cpp_evaluator_copy", cpp_evaluator.__file__)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_without_the_library_python_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(copy_of_module(None, monkeypatch).evaluator(problem_of()), PythonEvaluator)


def test_a_broken_library_is_reported_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "_planner.so").write_bytes(b"not a library")
    module = copy_of_module(tmp_path / "_planner.so", monkeypatch)
    with pytest.warns(
        UserWarning, match="_planner.so cannot be loaded, so the slower Python evaluator is used"
    ) as reports:
        assert all(isinstance(module.evaluator(problem_of()), PythonEvaluator) for _ in range(2))
    assert len(reports) == 1
