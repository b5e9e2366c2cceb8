"""Search: near the optimum, never worse than its starts, deterministic for a seed."""

from dataclasses import replace
from itertools import product
from math import prod
from random import Random
from statistics import mean

import pytest

from realhf.plan.search.cpp_evaluator import evaluator, load_library
from realhf.plan.search.evaluate import objective
from realhf.plan.search.problem import Choice, Problem
from realhf.plan.search.search import StopReason, greedy, search
from tests.plan.search.instances import random_instance

SMALL = [p for p in (random_instance(seed, n_ranks=6, n_options=5, tight=seed % 2 == 0).problem for seed in range(150))
         if 20 <= prod(len(some) for some in p.table) <= 1000][:60]  # fmt: skip


def value(problem: Problem, choice: Choice) -> float:
    return objective(problem, *evaluator(problem).evaluate(choice))


def optimum(problem: Problem) -> float:
    plans = evaluator(problem)
    choices = product(*(range(len(some)) for some in problem.table))
    return min(objective(problem, *plans.evaluate(choice)) for choice in choices)


def test_search_finds_nearly_the_optimum() -> None:
    assert len(SMALL) >= 50
    for problem in SMALL:
        result = search(problem)
        assert objective(problem, result.seconds, result.peak) <= optimum(problem) * 1.01


def test_search_is_never_worse_than_any_start() -> None:
    for seed in range(1000 if load_library() else 50):
        problem = random_instance(seed, n_ranks=8, n_options=8, tight=True).problem
        random = Random(seed)
        starts = [tuple(random.randrange(len(some)) for some in problem.table) for _ in range(3)]
        result = search(problem, starts, budget=seed % 100)
        assert objective(problem, result.seconds, result.peak) <= min(value(problem, start) for start in starts)


@pytest.fixture(scope="module")
def problem() -> Problem:
    return random_instance(11, n_mfcs=5, n_ranks=8, n_options=8, tight=True).problem


def test_a_search_is_deterministic_and_consistent(problem: Problem) -> None:
    one, other = (search(problem, seed=3, budget=1500) for _ in range(2))
    assert one == other and one.stop is not StopReason.CLOCK and one.n_evaluated <= 1500
    assert (one.seconds, one.peak) == evaluator(problem).evaluate(one.choice)
    assert one.fits == (one.peak <= problem.capacity)
    gains = [gain for _, gain in one.history]
    assert gains == sorted(gains, reverse=True) and gains[-1] == objective(problem, one.seconds, one.peak)
    assert [at for at, _ in one.history] == sorted({at for at, _ in one.history})


def test_the_clock_ends_a_search(problem: Problem) -> None:
    start = tuple(len(some) - 1 for some in problem.table)
    result = search(problem, [start], budget_s=0.0)
    assert result.stop is StopReason.CLOCK
    assert objective(problem, result.seconds, result.peak) <= value(problem, start)


def test_a_problem_without_alternatives() -> None:
    alone = next(i.problem for i in map(random_instance, range(99)) if all(len(t) == 1 for t in i.problem.table))
    result = search(alone)
    assert result.choice == tuple(0 for _ in alone.table)


def test_if_no_plan_fits_the_smallest_is_returned() -> None:
    tight = replace(SMALL[0], capacity=1e-3)
    result = search(tight)
    peaks = [evaluator(tight).evaluate(c)[1] for c in product(*(range(len(some)) for some in tight.table))]
    assert not result.fits and result.peak == min(peaks)


def test_greedy_returns_the_fastest_options_that_fit(problem: Problem) -> None:
    for some, i in zip(problem.table, greedy(problem), strict=True):
        fitting = [o for o in some if o.transient + o.resident <= problem.capacity] or some
        seconds = [o.transfer.seconds + mean(cost.seconds for cost in o.compute) for o in (some[i], *fitting)]
        assert seconds[0] == min(seconds)
