"""Changes of an instance whose effect is known: faster machines, longer rows, fewer models, more or other nodes."""

from random import Random

import pytest

from realhf.plan.compile.heuristic import HEURISTICS
from realhf.plan.search.planner import Planner
from tests.plan.search.random_planners import random_plan, random_planner
from tests.plan.search.variations import (
    FASTER,
    on,
    removable,
    renumbered,
    with_another_node,
    with_longer_rows,
    without,
)
from tests.scaling import examples

ROUNDING = 1 + 1e-9
TRANSFERS = 1.01  # tables approximate transfers of rows, and only the best plans of a search are simulated
BAND = 1.1
"""Searches with different seeds and a small budget agree within this factor."""
QUICK = 3


def order_change(planner: Planner) -> float:
    """Return the factor by which a faster machine may be slower.

    With rollouts ahead, shorter calls can change the order in which calls wait for a worker, and a list schedule with
    another order may be longer (Graham 1969, "Bounds on multiprocessing timing anomalies").
    """
    return 1.15 if planner.max_staleness else ROUNDING


def check_plan(seed: int) -> None:
    """Check the variations under which a plan stays valid."""
    planner, random = random_planner(seed), Random(seed)
    plan = random_plan(planner, random)
    seconds = planner.predict(plan).seconds
    for name, change in FASTER.items():
        faster = on(planner, change(planner.calls.hardware)).predict(plan).seconds
        assert faster <= seconds * order_change(planner), (seed, name)
    assert with_longer_rows(planner, random).predict(plan).seconds >= seconds / order_change(planner), seed
    for name in removable(planner.graph):
        fewer, rest = without(planner, plan, name)
        assert fewer.predict(rest).seconds <= seconds * order_change(planner), (seed, name)
    renamed = planner.predict(renumbered(planner, plan, random)).seconds
    assert renamed == pytest.approx(seconds, rel=1e-9), seed
    larger = with_another_node(planner).predict(plan).seconds  # a node of CPU workers adds cores
    assert larger <= seconds * ROUNDING and (planner.cores or larger == pytest.approx(seconds, rel=1e-9)), seed


def check_search(seed: int, n_plans: int) -> None:
    """Check a searched plan against rules, random plans, other seeds, a larger cluster and a faster machine."""
    planner, random = random_planner(seed), Random(seed)
    found = planner.search(seed)
    if not planner.fits(found.plan):
        assert not any(planner.fits(planner.by_heuristic(rule)) for rule in HEURISTICS), seed
        return
    for rule in HEURISTICS:
        plan = planner.by_heuristic(rule)
        assert not planner.fits(plan) or found.seconds <= planner.predict(plan).seconds * ROUNDING, seed
    for plan in (random_plan(planner, random) for _ in range(n_plans)):
        assert not planner.fits(plan) or found.seconds <= planner.predict(plan).seconds * TRANSFERS, seed
    assert planner.search(seed + 1).seconds <= BAND * found.seconds, seed
    changed: dict[str, Planner] = {"nodes": with_another_node(planner)}
    changed |= {name: on(planner, change(planner.calls.hardware)) for name, change in FASTER.items()}
    for name in ("nodes", random.choice([*FASTER])):
        better = changed[name].search(seed, starts=[found.plan]).seconds
        assert better <= found.seconds * order_change(planner), (seed, name)


@pytest.mark.parametrize("seed", range(4 * QUICK))
def test_a_plan_of_a_varied_instance(seed: int) -> None:
    check_plan(seed)


@pytest.mark.parametrize("seed", range(QUICK))
def test_a_search_of_a_varied_instance(seed: int) -> None:
    check_search(seed, 20)


@pytest.mark.slow
@pytest.mark.parametrize("chunk", range(10))
def test_plans_of_two_hundred_varied_instances(chunk: int) -> None:
    for seed in range(chunk, 200, 10):
        check_plan(seed)


@pytest.mark.slow
@pytest.mark.parametrize("chunk", range(10))
def test_searches_of_varied_instances(chunk: int) -> None:
    for seed in range(chunk, examples(25), 10):
        check_search(seed, 20)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1000, 1003))
def test_a_searched_plan_is_not_slower_than_thousands_of_random_plans(seed: int) -> None:
    check_search(seed, 5000)
