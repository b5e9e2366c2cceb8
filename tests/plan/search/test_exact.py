"""Branch and bound compared with exhaustive search."""

from itertools import product
from random import Random

import pytest

from realhf.plan.search.cpp_evaluator import evaluator
from realhf.plan.search.evaluate import objective
from tests.plan.search.exact import branch_and_bound, lower_bound
from tests.plan.search.instances import random_instance
from tests.plan.search.test_evaluate import evaluate, problem_of


@pytest.mark.parametrize("seed", range(60))
def test_finds_the_optimum_and_bounds_are_valid(seed: int) -> None:
    problem = random_instance(seed, n_ranks=6, n_options=4, tight=seed % 2 == 0).problem
    plans = evaluator(problem)
    choices = list(product(*(range(len(some)) for some in problem.table)))
    values = {choice: objective(problem, *plans.evaluate(choice)) for choice in choices}
    choice, value = branch_and_bound(problem)
    assert value == values[choice] == min(values.values())
    random = Random(seed)
    for choice in random.choices(choices, k=20):
        partial = [i if random.random() < 0.5 else None for i in choice]
        assert lower_bound(problem, partial) <= values[choice]


def test_bound_is_exact_for_sequential_calls() -> None:
    problem = problem_of()
    for choice in ((0, 0, 0), (1, 0, 0)):
        assert lower_bound(problem, choice) == pytest.approx(evaluate(problem, choice)[0])
    assert lower_bound(problem, (None, 0, 0)) == pytest.approx(
        4.25 + 1.25 + 2.25
    )  # the cost of its reallocation is unknown
