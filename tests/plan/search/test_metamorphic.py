"""Changes of an instance whose effect is known: faster machines, longer rows, fewer models, more or other nodes."""

from dataclasses import replace
from random import Random

import pytest

from realhf.plan.compile.forwarding import forwarded_keys
from realhf.plan.compile.heuristic import HEURISTICS
from realhf.plan.search.planner import Planner
from realhf.plan.search.timeline import Prediction
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
BAND = 1.1
"""Searches with different seeds and a small budget agree within this factor."""
QUICK = 3


def is_not_slower(fast: Prediction, slow: Prediction, planner: Planner) -> bool:
    """Return whether a step takes at most as long; with rollouts ahead it may be longer if none of its calls is.

    With rollouts ahead, shorter calls can change the order in which calls wait for a worker, and a list schedule with
    another order may be longer (Graham 1969, "Bounds on multiprocessing timing anomalies").
    """
    if fast.seconds <= slow.seconds * ROUNDING or not planner.max_staleness:
        return fast.seconds <= slow.seconds * ROUNDING
    others = slow.call_seconds
    return all(a <= b * ROUNDING for name, parts in fast.call_seconds.items()
               for a, b in zip(parts, others[name], strict=True))  # fmt: skip


def check_plan(seed: int) -> None:
    """Check the variations under which a plan stays valid."""
    planner, random = random_planner(seed), Random(seed)
    plan = random_plan(planner, random)
    predicted = planner.predict(plan)
    for name, change in FASTER.items():
        faster = on(planner, change(planner.calls.hardware)).predict(plan)
        assert is_not_slower(faster, predicted, planner), (seed, name)
    longer = with_longer_rows(planner, random).predict(plan)
    assert is_not_slower(predicted, longer, planner), seed
    couriers = forwarded_keys(planner.graph, plan, planner.max_staleness)
    for name in set(removable(planner.graph)) - couriers.keys():  # without a courier, its rows are late
        fewer, rest = without(planner, plan, name)
        assert is_not_slower(fewer.predict(rest), predicted, planner), (seed, name)
    renamed = planner.predict(renumbered(planner, plan, random)).seconds
    assert renamed == pytest.approx(predicted.seconds, rel=1e-9), seed
    larger = with_another_node(planner).predict(plan)  # a node of CPU workers adds cores
    assert is_not_slower(larger, predicted, planner), seed
    assert planner.cores or larger.seconds == pytest.approx(predicted.seconds, rel=1e-9), seed


def check_search(seed: int, n_plans: int) -> None:
    """Check a searched plan against rules, random plans, other seeds, a larger cluster and a faster machine."""
    planner, random = random_planner(seed), Random(seed)
    found = planner.search(seed)
    if not planner.fits(found.plan):
        assert not any(planner.fits(planner.by_heuristic(rule)) for rule in HEURISTICS), seed
        return
    rules = [planner.by_heuristic(rule) for rule in HEURISTICS]
    for plan in (*rules, *(random_plan(planner, random) for _ in range(n_plans))):
        assert not planner.fits(plan) or found.seconds <= planner.predict(plan).seconds * ROUNDING, seed
    assert planner.search(seed + 1).seconds <= BAND * found.seconds, seed
    changed: dict[str, Planner] = {"nodes": with_another_node(planner)}
    changed |= {name: on(planner, change(planner.calls.hardware)) for name, change in FASTER.items()}
    for name in ("nodes", random.choice([*FASTER])):
        same = changed[name].predict(replace(found.plan, n_workers=changed[name].n_workers)).seconds
        better = changed[name].search(seed, starts=[found.plan]).seconds
        assert better <= same * ROUNDING, (seed, name)
        assert planner.max_staleness or better <= found.seconds * ROUNDING, (seed, name)


@pytest.mark.parametrize("seed", range(4 * QUICK))
def test_a_plan_of_a_varied_instance(seed: int) -> None:
    check_plan(seed)


@pytest.mark.parametrize("seed", range(QUICK))
def test_a_search_of_a_varied_instance(seed: int) -> None:
    check_search(seed, 20)


@pytest.mark.slow
@pytest.mark.parametrize("chunk", range(10))
def test_plans_of_varied_instances(chunk: int) -> None:
    for seed in range(chunk, examples(60), 10):
        check_plan(seed)


@pytest.mark.slow
@pytest.mark.parametrize("chunk", range(10))
def test_searches_of_varied_instances(chunk: int) -> None:
    for seed in range(chunk, examples(10), 10):
        check_search(seed, 20)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1000, 1000 + examples(1)))
def test_a_searched_plan_is_not_slower_than_thousands_of_random_plans(seed: int) -> None:
    check_search(seed, 5000)
