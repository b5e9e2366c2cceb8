"""Searches for the least memory."""

from dataclasses import replace

import pytest

from realhf.api.execution_plan import MicroBatching
from realhf.plan.advice.goals import SLACK, least_memory
from realhf.plan.compile.heuristic import HEURISTICS
from tests.plan.search.planners import LLAMA, TOY, WIDE, ppo_planner

LARGE = replace(TOY, memory=1e11)


@pytest.mark.parametrize("n_workers", [1, 4])
def test_the_least_memory_is_below_that_of_heuristics_and_of_the_fastest_plan(n_workers: int) -> None:
    planner = ppo_planner(n_workers, LARGE, WIDE, 256)
    found, fastest = least_memory(planner), planner.search()
    peak = planner.predict(found.plan).peak
    others = [fastest.plan, *(planner.by_heuristic(name) for name in HEURISTICS)]
    assert peak <= SLACK * min(planner.predict(plan).peak for plan in others) * (1 + 1e-9)
    assert peak < planner.predict(fastest.plan).peak
    assert found.result.seconds >= 0 and found.plan.n_workers == n_workers


def test_the_result_is_reproducible() -> None:
    planner = ppo_planner(2, actor=WIDE)
    assert least_memory(planner, seed=3).plan == least_memory(planner, seed=3).plan


def test_the_peak_is_not_above_that_of_a_start() -> None:
    """The start has smaller micro-batches than a search tries."""
    planner = replace(ppo_planner(2, LARGE, replace(LLAMA, vocab=50_000), 256), max_evaluations=300)
    alone = least_memory(planner).plan
    tiny = MicroBatching(max_tokens_per_mb=64, max_num_seqs=2)
    start = replace(alone, placements={n: replace(p, micro_batching=tiny) for n, p in alone.placements.items()})
    first, second, found = (planner.predict(p).peak for p in (alone, start, least_memory(planner, starts=[start]).plan))
    assert found <= SLACK * second and SLACK * second < first
