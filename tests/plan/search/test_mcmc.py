"""One chain of Metropolis-Hastings."""

from collections import Counter

import pytest

from realhf.plan.search.evaluate import evaluate
from realhf.plan.search.mcmc import Chain, PythonEvaluator, SplitMix64
from tests.plan.search.instances import random_instance

PROBLEM = random_instance(5, n_mfcs=3).problem
START = tuple(0 for _ in PROBLEM.table)


def test_the_dice_are_those_of_the_paper() -> None:
    dice = SplitMix64(1234567)  # the values of the reference implementation
    assert [dice.next() for _ in range(3)] == [6457827717110365317, 3203168211198807973, 9817491932198370423]
    assert all(0 <= dice.uniform() < 1 for _ in range(100))


def test_the_same_dice_lead_the_same_way_in_any_portions() -> None:
    one, other = (Chain.start(SplitMix64(7), START, 1e9) for _ in range(2))
    players = PythonEvaluator(PROBLEM)
    players.run_chain(one, 60, 0.2)
    for n in (10, 20, 30):
        players.run_chain(other, n, 0.2)
    assert one == other


def test_cold_chains_only_go_down_and_remember_the_best() -> None:
    walker = Chain.start(SplitMix64(3), START, evaluate(PROBLEM, START)[0])
    players, values = PythonEvaluator(PROBLEM), []
    for _ in range(50):
        players.run_chain(walker, 1, 1e-12)
        values.append(walker.value)
    assert values == sorted(values, reverse=True)
    assert walker.best_value == values[-1] == evaluate(PROBLEM, walker.best)[0]


def test_what_is_worse_by_the_temperature_is_accepted_in_one_of_e_cases() -> None:
    instance = next(i.problem for i in map(random_instance, range(99)) if [len(t) for t in i.problem.table] == [2])
    costs = [evaluate(instance, (i,))[0] for i in (0, 1)]
    good, bad = sorted(range(2), key=costs.__getitem__)
    worse = costs[bad] / costs[good] - 1
    players, seen = PythonEvaluator(instance), Counter[int]()
    for seed in range(2000):
        walker = Chain.start(SplitMix64(seed), (good,), costs[good])
        players.run_chain(walker, 1, worse)
        seen[walker.choice[0]] += 1
    assert worse > 0
    # one proposal changes the option once, or an even number of times with ONE_MORE: those stay
    assert seen[bad] / 2000 == pytest.approx(0.8 * 0.368, abs=0.03)


def test_nothing_to_choose_is_no_walk() -> None:
    alone = next(i.problem for i in map(random_instance, range(99)) if all(len(t) == 1 for t in i.problem.table))
    walker = Chain.start(SplitMix64(1), tuple(0 for _ in alone.table), 5.0)
    PythonEvaluator(alone).run_chain(walker, 10, 0.1)
    assert walker == Chain.start(SplitMix64(1), tuple(0 for _ in alone.table), 5.0)
