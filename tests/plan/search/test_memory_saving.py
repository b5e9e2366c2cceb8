"""The planner's choices where gradient_checkpointing and optimizer.offload are ``auto``."""

from dataclasses import replace

import pytest

from realhf.api.config import OptimizerConfig, Recompute
from realhf.api.config.option import AUTO
from realhf.api.execution_plan import ExecutionPlan, MemorySaving, Placement
from realhf.api.machine import Link, Workload
from realhf.plan.compile.heuristic import HEURISTICS
from realhf.plan.search.candidates import Candidate
from realhf.plan.search.planner import Planner
from tests.plan.search.planners import TOY, WIDE, layout, ppo_planner

LONG = Workload(((100,),), (300,))
EXPLICIT: dict[str, dict] = {
    "none": {},
    "selective": {"gradient_checkpointing": True, "recompute_granularity": Recompute.selective},
    "full": {"gradient_checkpointing": True},
}
CHOSEN = {"none": None, "selective": Recompute.selective, "full": Recompute.full}
TRAINERS = ("actor_train", "critic_train")


def planner_with(memory: float, n_workers: int = 1, **spec: object) -> Planner:
    hardware = replace(TOY, memory=memory / (1 - TOY.reserve_fraction))
    return ppo_planner(n_workers, hardware, WIDE, workload=LONG, batch=32, **spec)  # type: ignore[arg-type]


def fixed(planner: Planner) -> ExecutionPlan:
    n, limits = planner.n_workers, planner.calls.limits
    return ExecutionPlan(n, {m.name: Placement(layout(f"d{n}"), limits[m.name]) for m in planner.graph.mfcs})


def peak(planner: Planner, plan: ExecutionPlan) -> float:
    return max(some.total for some in planner.calls.memory.devices(
        plan, {m.name: planner.calls.rows(m, plan[m.name].layout.strategy.dp) for m in planner.graph.mfcs}
    ).values())  # fmt: skip


PEAKS = {name: peak(planner := planner_with(1e12, **options), fixed(planner)) for name, options in EXPLICIT.items()}
MEMORY = {"none": 1.01 * PEAKS["none"], "selective": 1.01 * PEAKS["selective"], "full": 1.01 * PEAKS["full"]}
"""Bytes with which a fixed plan on one worker fits if it recomputes at least so much."""


def test_recomputation_saves_memory_here() -> None:
    assert MEMORY["full"] < PEAKS["selective"] and MEMORY["selective"] < PEAKS["none"]


@pytest.mark.parametrize("least", EXPLICIT)
def test_a_fixed_plan_recomputes_what_it_must(least: str) -> None:
    planner = planner_with(MEMORY[least], gradient_checkpointing=AUTO)
    plan = planner.with_savings(fixed(planner))
    assert planner.fits(plan) and peak(planner, plan) <= 1.01 * PEAKS[least]
    savings = [plan[name].saving for name in TRAINERS]
    assert CHOSEN[least] in [saving and saving.recompute for saving in savings]
    assert all(placement.saving is None for name, placement in plan.placements.items() if name not in TRAINERS)
    times = [planner_with(MEMORY[least], **options).predict(fixed(planner)).seconds for options in EXPLICIT.values()]
    assert min(times) - 1e-9 <= planner.predict(plan).seconds <= times[list(EXPLICIT).index(least)] + 1e-9


@pytest.mark.parametrize("mode", ["symmetric", "search"])
def test_four_workers_recompute_less_than_one(mode: str) -> None:
    def chosen(n_workers: int) -> list[Recompute | None]:
        planner = planner_with(memory, n_workers, gradient_checkpointing=AUTO)
        plan = planner.search().plan if mode == "search" else planner.by_heuristic(mode)
        assert planner.fits(plan)
        return [saving.recompute for name in TRAINERS if (saving := plan[name].saving)]

    memory = 1.02 * smallest_peak("full")
    assert memory < smallest_peak("selective")
    assert chosen(1) == [Recompute.full, Recompute.full]
    assert Recompute.full not in chosen(4)


def smallest_peak(name: str) -> float:
    """Return the peak of a plan on one worker with the smallest micro-batches."""
    planner = planner_with(1e6 + TOY.reserved, **EXPLICIT[name])
    return peak(planner, planner.by_heuristic("symmetric"))


@pytest.mark.parametrize("share", [1.02, 1.3, 2.0, 4.0])
def test_the_searched_plan_is_as_fast_as_with_the_best_explicit_value(share: float) -> None:
    memory = share * smallest_peak("full")
    searched = {}
    for name, options in ({"auto": {"gradient_checkpointing": AUTO}} | EXPLICIT).items():
        planner = planner_with(memory, 2, **options)
        found = planner.search()
        if planner.fits(found.plan):
            searched[name] = planner.predict(found.plan).seconds
    assert searched["auto"] <= min(searched.values()) * 1.01 and len(searched) > 1  # tables differ in micro-batches


@pytest.mark.parametrize("bus", [1e8, 1e13])
def test_optimizer_state_is_offloaded_only_where_memory_needs_it(bus: float) -> None:
    def planner(memory: float) -> Planner:
        made = planner_with(memory, gradient_checkpointing=True, optimizer=OptimizerConfig(offload=AUTO))
        hardware = replace(made.calls.hardware, host=Link(bus, 1e-4))
        speed = replace(made.calls.cost.speed, hardware=hardware)  # type: ignore[type-var]
        return replace(made, calls=replace(made.calls, cost=replace(made.calls.cost, speed=speed)))

    def chosen(memory: float) -> set[bool]:
        made = planner(memory)
        plan = made.with_savings(fixed(made))
        assert made.fits(plan)
        return {saving.offload_optimizer for name in TRAINERS if (saving := plan[name].saving)}

    if bus < 1e9:  # offloading takes time
        assert chosen(1e12) == {False}
    optimizer = planner(1e12).calls.memory.resident("actor", layout("d1").strategy).optimizer
    assert True in chosen(PEAKS["full"] - 0.2 * optimizer)  # two chunks of the state are on the device


def test_explicit_values_are_not_changed() -> None:
    for options in EXPLICIT.values():
        planner = planner_with(MEMORY["full"], **options)
        plan = fixed(planner)
        assert planner.with_savings(plan) is plan
        for name in HEURISTICS:
            assert all(p.saving is None for p in planner.by_heuristic(name).placements.values())


def test_variants_are_slower_and_smaller() -> None:
    planner = planner_with(1e12, gradient_checkpointing=AUTO, optimizer=OptimizerConfig(offload=AUTO))
    for mfc in planner.graph.mfcs:
        variants: list[Candidate] = planner.calls.variants(mfc, layout("d1"))
        assert variants[0] == planner.calls.of(mfc, layout("d1"))
        assert (len(variants) > 2) == mfc.is_train
        for before, after in zip(variants, variants[1:], strict=False):
            assert before.cost.seconds <= after.cost.seconds and before.bytes > after.bytes


def test_nothing_fits() -> None:
    planner = planner_with(TOY.reserved + 1e6, gradient_checkpointing=AUTO)
    plan = planner.with_savings(fixed(planner))
    assert not planner.fits(plan) and plan["actor_train"].saving == MemorySaving(Recompute.full)
