"""Random plans: any layouts of the calls that a search considers, with which all calls fit in memory."""

from collections.abc import Collection
from contextlib import suppress
from random import Random

from realhf.api.execution_plan import ExecutionPlan
from realhf.plan.compile.check import layouts
from realhf.plan.search.planner import Planner

MAX_DRAWS = 200  # per plan


def random_plans(planner: Planner, n: int, seed: int, excluded: Collection[ExecutionPlan] = ()) -> list[ExecutionPlan]:
    """Return ``n`` distinct plans that fit and are not among ``excluded``; ValueError if there are too few.

    The layout of every call is drawn uniformly; its micro-batching is the fastest one that fits.
    """
    random, found = Random(seed), list[ExecutionPlan]()
    for _ in range(MAX_DRAWS * n):
        if len(found) == n:
            break
        with suppress(ValueError):  # a profile may lack a layout, or links
            plan = _draw(planner, random)
            planner.predict(plan)
            if planner.fits(plan) and plan not in found and plan not in excluded:
                found.append(plan)
    if len(found) < n:
        raise ValueError(f"only {len(found)} of {n} random plans were found in {MAX_DRAWS * n} draws")
    return found


def _draw(planner: Planner, random: Random) -> ExecutionPlan:
    placements = {}
    for mfc in planner.graph.mfcs:
        config = planner.calls.cost.models.get(mfc.role) if mfc.role else None
        layout = random.choice(layouts(planner.n_workers, planner.cluster.node_size, config))
        placements[mfc.name] = planner.calls.of(mfc, layout).placement
    return ExecutionPlan(planner.n_workers, placements)
