"""Search: as good as the best there is, never worse than where it starts, the same for the same seed."""

from dataclasses import replace
from itertools import product
from math import prod
from random import Random

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


def least(problem: Problem) -> float:
    """Look at every choice."""
    players = evaluator(problem)
    choices = product(*(range(len(some)) for some in problem.table))
    return min(objective(problem, *players.evaluate(choice)) for choice in choices)


def test_search_finds_what_looking_at_everything_finds() -> None:
    assert len(SMALL) >= 50
    for problem in SMALL:
        found = search(problem)
        assert objective(problem, found.seconds, found.peak) <= least(problem) * 1.01


def test_search_is_never_worse_than_any_start() -> None:
    for seed in range(1000 if load_library() else 50):
        problem = random_instance(seed, n_ranks=8, n_options=8, tight=True).problem
        random = Random(seed)
        starts = [tuple(random.randrange(len(some)) for some in problem.table) for _ in range(3)]
        found = search(problem, starts, budget=seed % 100)
        assert objective(problem, found.seconds, found.peak) <= min(value(problem, start) for start in starts)


@pytest.fixture(scope="module")
def problem() -> Problem:
    return random_instance(11, n_mfcs=5, n_ranks=8, n_options=8, tight=True).problem


def test_the_same_seed_finds_the_same_and_says_what_it_did(problem: Problem) -> None:
    one, other = (search(problem, seed=3, budget=1500) for _ in range(2))
    assert one == other and one.stop is not StopReason.CLOCK and one.n_evaluated <= 1500
    assert (one.seconds, one.peak) == evaluator(problem).evaluate(one.choice)
    assert one.fits == (one.peak <= problem.capacity)
    gains = [gain for _, gain in one.history]
    assert gains == sorted(gains, reverse=True) and gains[-1] == objective(problem, one.seconds, one.peak)
    assert [at for at, _ in one.history] == sorted({at for at, _ in one.history})


def test_the_clock_ends_a_search_and_the_result_says_so(problem: Problem) -> None:
    start = tuple(len(some) - 1 for some in problem.table)
    found = search(problem, [start], budget_s=0.0)
    assert found.stop is StopReason.CLOCK
    assert objective(problem, found.seconds, found.peak) <= value(problem, start)


def test_a_choice_without_an_alternative_is_found() -> None:
    alone = next(i.problem for i in map(random_instance, range(99)) if all(len(t) == 1 for t in i.problem.table))
    found = search(alone)
    assert found.choice == tuple(0 for _ in alone.table)


def test_where_nothing_fits_the_leanest_is_found_and_the_result_says_so() -> None:
    tight = replace(SMALL[0], capacity=1e-3)
    found = search(tight)
    peaks = [evaluator(tight).evaluate(c)[1] for c in product(*(range(len(some)) for some in tight.table))]
    assert not found.fits and found.peak == min(peaks)


def test_greedy_takes_the_fastest_that_fits(problem: Problem) -> None:
    for some, i in zip(problem.table, greedy(problem), strict=True):
        fitting = [o for o in some if o.transient + o.resident <= problem.capacity] or some
        assert some[i].transfer.seconds + some[i].compute.seconds == min(
            o.transfer.seconds + o.compute.seconds for o in fitting
        )
