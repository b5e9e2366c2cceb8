"""Branch and bound against looking at everything."""

from itertools import product
from random import Random

import pytest

from realhf.plan.search.cpp_evaluator import evaluator
from realhf.plan.search.evaluate import evaluate, objective
from tests.plan.search.exact import branch_and_bound, lower_bound
from tests.plan.search.instances import random_instance
from tests.plan.search.test_evaluate import problem_of


@pytest.mark.parametrize("seed", range(60))
def test_the_best_choice_is_found_and_no_bound_is_above_it(seed: int) -> None:
    problem = random_instance(seed, n_ranks=6, n_options=4, tight=seed % 2 == 0).problem
    players = evaluator(problem)
    choices = list(product(*(range(len(some)) for some in problem.table)))
    values = {choice: objective(problem, *players.evaluate(choice)) for choice in choices}
    choice, value = branch_and_bound(problem)
    assert value == values[choice] == min(values.values())
    random = Random(seed)
    for choice in random.choices(choices, k=20):
        partial = [i if random.random() < 0.5 else None for i in choice]
        assert lower_bound(problem, partial) <= values[choice]


def test_the_bound_is_the_truth_where_calls_follow_each_other() -> None:
    problem = problem_of()
    for choice in ((0, 0, 0), (1, 0, 0)):
        assert lower_bound(problem, choice) == pytest.approx(evaluate(problem, choice)[0])
    assert lower_bound(problem, (None, 0, 0)) == pytest.approx(4.25 + 1.25 + 2.25)  # its copy unknown
