"""Planning problems: validation, dependencies, and cached costs."""

from dataclasses import replace

import pytest

from realhf.api.graph import Graph, Sync
from realhf.api.machine import Cost
from realhf.plan.search.problem import LayoutOption, Problem, ReallocCost
from tests.plan.compile.test_schedule import ppo

HERE = LayoutOption(range(0, 2), range(0, 2), (Cost(1.0, 2.0),))


def problem_of(graph: Graph, option: LayoutOption = HERE, capacity: float = 1.0) -> Problem:
    return Problem(graph, {m.name: [option, option] for m in graph.mfcs}, 2, 4, capacity, max_staleness=1)


def test_missing_options_and_invalid_ranks_are_errors() -> None:
    graph = ppo()
    with pytest.raises(ValueError, match="no layout fits ref"):
        Problem(graph, {m.name: [HERE] if m.name != "ref" else [] for m in graph.mfcs}, 2, 4, 1.0)
    for ranks in (range(1, 3), range(0), range(0, 2, 2)):
        with pytest.raises(ValueError, match=r"gen on range\("):
            problem_of(graph, replace(HERE, ranks=ranks))
    with pytest.raises(ValueError, match="capacity of a worker must be positive, got -5 bytes"):
        problem_of(graph, capacity=-5.0)


def test_dependencies_of_mfcs() -> None:
    names = [m.name for m in ppo().mfcs]
    deps = dict(zip(names, problem_of(ppo()).deps, strict=True))
    number = {name: i for i, name in enumerate(names)}
    assert deps["gen"].parents == () and deps["gen"].row_sources == (number["gen"],)
    assert deps["rew"].parents == (number["gen"],) and deps["rew"].row_sources == (number["gen"], number["gen"])
    assert set(deps["train"].parents) == {number[n] for n in ("gen", "rew", "ref", "critic")}
    assert (deps["gen"].updater, deps["gen"].allowed_staleness, deps["gen"].home_mfc) == (
        number["train"],
        1,
        number["train"],
    )
    assert (deps["train"].updater, deps["train"].allowed_staleness) == (number["train"], 0)
    assert (deps["ref"].updater, deps["ref"].home_mfc, deps["rew"].home_mfc) == (-1, number["ref"], -1)


def test_an_ema_target_waits_for_its_source() -> None:
    graph = replace(ppo(), syncs=(Sync("train", "actor", "ref", 0.1),), offloaded=("critic",))
    problem = problem_of(graph)
    train, ref = problem.number["train"], problem.number["ref"]
    assert problem.deps[ref].updater == train
    assert [(f.after, f.source, f.target) for f in problem.ema_syncs] == [(train, train, ref)]
    assert [m.name for m, deps in zip(graph.mfcs, problem.deps, strict=True) if deps.offloaded] == [
        "critic",
        "critic_train",
    ]


def test_costs_are_computed_once_and_on_demand() -> None:
    calls: list[tuple[str, int, int]] = []

    def realloc(mfc: str, option: int, home: int) -> ReallocCost:
        calls.append((mfc, option, home))
        return ReallocCost(nbytes=7.0)

    problem = replace(problem_of(ppo()), realloc=realloc)
    gen = problem.number["gen"]
    assert problem.realloc_cost(gen, 1, 0).nbytes == problem.realloc_cost(gen, 1, 0).nbytes == 7.0
    assert calls == [("gen", 1, 0)]
