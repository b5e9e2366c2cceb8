"""The Metropolis-Hastings chain."""

from collections import Counter

import pytest

from realhf.plan.search.evaluate import PythonEvaluator
from realhf.plan.search.mcmc import Chain, SplitMix64
from tests.plan.search.instances import random_instance
from tests.plan.search.test_evaluate import evaluate

PROBLEM = random_instance(5, n_mfcs=3).problem
START = tuple(0 for _ in PROBLEM.table)


def test_splitmix64_matches_the_reference_implementation() -> None:
    rng = SplitMix64(1234567)
    assert [rng.next() for _ in range(3)] == [6457827717110365317, 3203168211198807973, 9817491932198370423]
    assert all(0 <= rng.uniform() < 1 for _ in range(100))


def test_chunking_does_not_change_a_chain() -> None:
    one, other = (Chain.start(SplitMix64(7), START, 1e9) for _ in range(2))
    plans = PythonEvaluator(PROBLEM)
    plans.run_chain(one, 60, 0.2)
    for n in (10, 20, 30):
        plans.run_chain(other, n, 0.2)
    assert one == other


def test_cold_chains_only_improve() -> None:
    chain = Chain.start(SplitMix64(3), START, evaluate(PROBLEM, START)[0])
    plans, values = PythonEvaluator(PROBLEM), []
    for _ in range(50):
        plans.run_chain(chain, 1, 1e-12)
        values.append(chain.value)
    assert values == sorted(values, reverse=True)
    assert chain.best_value == values[-1] == evaluate(PROBLEM, chain.best)[0]


def test_acceptance_probability() -> None:
    instance = next(i.problem for i in map(random_instance, range(9999)) if [len(t) for t in i.problem.table] == [2])
    costs = [evaluate(instance, (i,))[0] for i in (0, 1)]
    good, bad = sorted(range(2), key=costs.__getitem__)
    worse = costs[bad] / costs[good] - 1
    plans, seen = PythonEvaluator(instance), Counter[int]()
    for seed in range(2000):
        chain = Chain.start(SplitMix64(seed), (good,), costs[good])
        plans.run_chain(chain, 1, worse)
        seen[chain.choice[0]] += 1
    assert worse > 0
    # with P_EXTRA_MUTATION, a proposal changes the only MFC an even number of times and has no effect
    assert seen[bad] / 2000 == pytest.approx(0.8 * 0.368, abs=0.03)


def test_chain_without_alternatives_does_not_move() -> None:
    alone = next(i.problem for i in map(random_instance, range(99)) if all(len(t) == 1 for t in i.problem.table))
    chain = Chain.start(SplitMix64(1), tuple(0 for _ in alone.table), 5.0)
    PythonEvaluator(alone).run_chain(chain, 10, 0.1)
    assert chain == Chain.start(SplitMix64(1), tuple(0 for _ in alone.table), 5.0)
