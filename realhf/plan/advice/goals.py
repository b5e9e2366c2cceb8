"""What a search minimizes: the time of a step, its cost over several sizes of the cluster, or peak memory."""

from collections.abc import Sequence
from dataclasses import replace
from enum import Enum

from realhf.api.execution_plan import ExecutionPlan
from realhf.plan.compile.heuristic import HEURISTICS
from realhf.plan.search.planner import PlannedSearch, Planner, find_choice, plan_layouts
from realhf.plan.search.search import search

SLACK = 1.02  # the fastest plan may need this much more than the least memory
SMALL = 1.0  # bytes: the search for the least memory needs no seconds of plans that fit


class Goal(Enum):
    """``cost`` is GPU-seconds of a step; on given workers, the plan with the fastest step has the lowest."""

    step = "step"
    cost = "cost"
    memory = "memory"


def least_memory(
    planner: Planner, seed: int = 1, budget_s: float = 60.0, starts: Sequence[ExecutionPlan] = ()
) -> PlannedSearch:
    """Return the fastest plan found whose peak memory is at most ``SLACK`` times the least peak found.

    Plans of heuristics and ``starts``, which may be for fewer workers, are considered. The search for the least peak
    assumes workers without memory: its objective is then proportional to the peak.
    """
    plans = [*planner.enlarged(starts), *(planner.by_heuristic(name) for name in HEURISTICS)]
    table = planner.candidates([plan_layouts(plan) for plan in plans], share=0.0)
    problem = replace(planner.problem(table), capacity=SMALL)
    choices = [find_choice(table, plan) for plan in plans]
    result = search(problem, choices, seed, planner.max_evaluations, budget_s / 2)
    placements = {m.name: table[m.name][i].placement for m, i in zip(planner.graph.mfcs, result.choice, strict=True)}
    smallest = min([ExecutionPlan(planner.n_workers, placements), *plans], key=lambda plan: _peak(planner, plan))
    hardware = planner.calls.hardware
    memory = SLACK * _peak(planner, smallest) / (1 - hardware.reserve_fraction)
    tight = replace(planner, calls=replace(planner.calls, hardware=replace(hardware, memory=memory)))
    found = tight.search(seed, budget_s / 2, starts)
    if tight.fits(found.plan):
        return found
    return PlannedSearch(smallest, planner.predict(smallest), result, problem, table)


def _peak(planner: Planner, plan: ExecutionPlan) -> float:
    return planner.predict(plan).peak
