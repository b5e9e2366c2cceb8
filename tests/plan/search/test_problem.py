"""Planning problems: what they refuse, what they know of the graph, and what they ask for."""

from dataclasses import replace

import pytest

from realhf.api.graph import Graph, Sync
from realhf.api.machine import Cost
from realhf.plan.search.problem import LayoutOption, Problem, ReallocCost
from tests.plan.compile.test_schedule import ppo

HERE = LayoutOption(range(0, 2), range(0, 2), Cost(1.0, 2.0))


def problem_of(graph: Graph, option: LayoutOption = HERE, capacity: float = 1.0) -> Problem:
    return Problem(graph, {m.name: [option, option] for m in graph.mfcs}, 2, 4, capacity, max_staleness=1)


def test_a_call_without_options_and_ranks_that_are_not_there_are_errors() -> None:
    graph = ppo()
    with pytest.raises(ValueError, match="no layout fits ref"):
        Problem(graph, {m.name: [HERE] if m.name != "ref" else [] for m in graph.mfcs}, 2, 4, 1.0)
    for ranks in (range(1, 3), range(0), range(0, 2, 2)):
        with pytest.raises(ValueError, match=r"gen on range\("):
            problem_of(graph, replace(HERE, ranks=ranks))
    with pytest.raises(ValueError, match="capacity of a worker must be positive, got -5 bytes"):
        problem_of(graph, capacity=-5.0)


def test_who_waits_for_whom() -> None:
    names = [m.name for m in ppo().mfcs]
    wires = dict(zip(names, problem_of(ppo()).deps, strict=True))
    number = {name: i for i, name in enumerate(names)}
    assert wires["gen"].parents == () and wires["gen"].row_sources == (number["gen"],)
    assert wires["rew"].parents == (number["gen"],) and wires["rew"].row_sources == (number["gen"], number["gen"])
    assert set(wires["train"].parents) == {number[n] for n in ("gen", "rew", "ref", "critic")}
    assert (wires["gen"].updater, wires["gen"].allowed_staleness, wires["gen"].home_mfc) == (
        number["train"],
        1,
        number["train"],
    )
    assert (wires["train"].updater, wires["train"].allowed_staleness) == (number["train"], 0)
    assert (wires["ref"].updater, wires["ref"].home_mfc, wires["rew"].home_mfc) == (-1, number["ref"], -1)


def test_a_follower_waits_for_the_one_it_follows() -> None:
    graph = replace(ppo(), syncs=(Sync("train", "actor", "ref", 0.1),), offloaded=("critic",))
    problem = problem_of(graph)
    train, ref = problem.number["train"], problem.number["ref"]
    assert problem.deps[ref].updater == train
    assert [(f.after, f.source, f.target) for f in problem.ema_syncs] == [(train, train, ref)]
    assert [m.name for m, wire in zip(graph.mfcs, problem.deps, strict=True) if wire.offloaded] == [
        "critic",
        "critic_train",
    ]


def test_tables_are_asked_once_and_only_for_what_is_looked_at() -> None:
    asked: list[tuple[str, int, int]] = []

    def move(mfc: str, option: int, home: int) -> ReallocCost:
        asked.append((mfc, option, home))
        return ReallocCost(nbytes=7.0)

    problem = replace(problem_of(ppo()), realloc=move)
    gen = problem.number["gen"]
    assert problem.realloc_cost(gen, 1, 0).nbytes == problem.realloc_cost(gen, 1, 0).nbytes == 7.0
    assert asked == [("gen", 1, 0)]
