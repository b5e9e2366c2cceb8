"""Asynchronous rollout: the steady state of a run in which generation may be ahead of training."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from realhf.api.execution_plan import ExecutionPlan, Placement
from realhf.api.graph import MFC, Graph, InterfaceSpec, Kind
from realhf.api.machine import Cost, Workload
from realhf.api.messages import PrepareCall
from realhf.api.program import Compute, Instruction
from realhf.plan.compile.schedule import Decision, FetchRows, Scheduler, StartCall
from realhf.plan.search.evaluate import PythonEvaluator
from realhf.plan.search.event_sim import CallOps, Op, WorkerQueues
from realhf.plan.search.planner import N_STEPS, N_STEPS_AHEAD
from realhf.plan.search.problem import LayoutOption, Problem
from realhf.plan.search.search import search
from realhf.plan.search.simulate import run_calls, simulate
from realhf.plan.search.timeline import steady_steps
from realhf.plan.train_schedule import TrainSchedule
from tests.plan.search.planners import WIDE, layout, ppo_planner

SPEC = InterfaceSpec("any")
GRAPH = Graph(
    (
        MFC("gen", "actor", Kind.GENERATE, SPEC, ("prompts",), ("tokens",), 4),
        MFC("rew", "rew", Kind.INFERENCE, SPEC, ("tokens",), ("rewards",), 4),
        MFC("train", "actor", Kind.TRAIN, SPEC, ("rewards",), (), 4),
    )
)
Calls = dict[str, tuple[int, float]]  # worker and seconds by call
SECONDS = st.integers(1, 8)


def ends_of(calls: Calls, staleness: int, n_steps: int, strict: bool) -> Sequence[float]:
    """Return the ends of the steps by the scheduler of the master; ``strict`` as in runs with checkpoints."""
    scheduler = Scheduler(GRAPH, TrainSchedule(4, 4 * n_steps, n_steps), staleness, strict)

    def on_finished(action: FetchRows | StartCall) -> Sequence[Decision]:
        return scheduler.advance(action.mfc if isinstance(action, StartCall) else None, action.span)

    def make_ops(call: StartCall) -> CallOps:
        worker, seconds = calls[call.mfc]
        return CallOps(call, [Op([worker], Cost(seconds, seconds))])

    return run_calls(WorkerQueues(3), scheduler.fetch_ahead(), on_finished, make_ops)[1]


def steady_seconds(calls: Calls, staleness: int, strict: bool = False, n_steps: int = 0) -> float:
    """Return the seconds per step, by default from as many steps as the planner simulates."""
    n_steps = n_steps or N_STEPS + N_STEPS_AHEAD * staleness
    ends, (first, last) = ends_of(calls, staleness, n_steps, strict), steady_steps(n_steps, staleness)
    return (ends[last] - ends[first]) / (last - first)


@pytest.mark.parametrize("strict", [False, True])
def test_a_step_on_two_meshes_takes_as_long_as_its_longer_half(strict: bool) -> None:
    """Generation takes 4 s on worker 0; rewards take 1 s and training 2 s on worker 1."""
    calls: Calls = {"gen": (0, 4.0), "rew": (1, 1.0), "train": (1, 2.0)}
    assert steady_seconds(calls, 0, strict) == 7.0
    assert steady_seconds(calls, 1, strict) == 4.0
    assert list(ends_of(calls, 1, 4, strict)) == [7.0, 11.0, 15.0, 19.0]
    calls |= {"train": (1, 5.0)}
    assert steady_seconds(calls, 0, strict) == 10.0
    assert steady_seconds(calls, 1, strict) == 6.0


@given(SECONDS, SECONDS, st.integers(1, 3), st.booleans())
def test_the_steady_state_is_the_longer_of_generation_and_training(
    gen: int, train: int, staleness: int, strict: bool
) -> None:
    calls: Calls = {"gen": (0, gen), "rew": (1, 0), "train": (1, train)}
    assert steady_seconds(calls, staleness, strict) == max(gen, train)
    assert steady_seconds(calls, staleness, strict, n_steps=40) == max(gen, train)


@pytest.mark.parametrize("further", [(), ("logprobs",)])
@pytest.mark.parametrize("places", [(0, 1, 1), (0, 1, 2), (0, 2, 1)])
def test_training_does_not_wait_for_rows_of_the_generating_worker(
    further: tuple[str, ...], places: tuple[int, int, int]
) -> None:
    """The worker of the rewards also gets the log-probs, before the next rollout begins."""
    gen, rew, train = GRAPH.mfcs
    train = replace(train, inputs=("tokens", "rewards", *further))
    graph = Graph((replace(gen, outputs=("tokens", "logprobs")), rew, train))
    calls = dict(zip(("gen", "rew", "train"), zip(places, (4.0, 1.0, 2.0), strict=True), strict=True))
    plan = ExecutionPlan(3, {name: Placement(layout("d1", worker)) for name, (worker, _) in calls.items()})

    def price(call: PrepareCall, step: Instruction) -> Cost:
        seconds = calls[call.mfc][1] if isinstance(step, Compute) else 0.0
        return Cost(seconds, seconds)

    n = N_STEPS + N_STEPS_AHEAD
    found = simulate(graph, plan, price, TrainSchedule(4, 4 * n, n), Workload(((2,),), (5,)), max_staleness=1)
    assert found.seconds_per_step == 4.0  # of generation


@given(SECONDS, SECONDS, SECONDS, st.integers(0, 3), st.booleans())
def test_one_worker_does_all_the_work_in_the_steady_state(
    gen: int, rew: int, train: int, staleness: int, strict: bool
) -> None:
    """Steps after the first one are shorter, because rollouts ahead were part of it; they do not count."""
    calls: Calls = {"gen": (0, gen), "rew": (0, rew), "train": (0, train)}
    assert steady_seconds(calls, staleness, strict) == gen + rew + train


@given(st.integers(1, 12), st.integers(0, 4))
def test_steady_steps_are_in_the_run(n_steps: int, staleness: int) -> None:
    first, last = steady_steps(n_steps, staleness)
    assert 0 <= first <= last < n_steps and (first < last) == (n_steps > 1)
    if n_steps >= 2 + 2 * staleness:
        assert (first, last) == (staleness, n_steps - 1 - staleness)


def option(start: int, stop: int, seconds: float) -> LayoutOption:
    return LayoutOption(range(start, stop), range(start, stop), (Cost(seconds, seconds),))


BOTH, LEFT, RIGHT = 0, 1, 2
OPTIONS = {
    "gen": [option(0, 2, 3.0), option(0, 1, 4.0), option(1, 2, 4.0)],
    "rew": [option(0, 2, 0.5), option(0, 1, 0.5), option(1, 2, 0.5)],
    "train": [option(0, 2, 2.5), option(0, 1, 3.0), option(1, 2, 3.0)],
}
"""Two workers are hardly faster than one: apart, generation and training overlap."""


@pytest.mark.parametrize("staleness", [1, 2])
def test_the_search_separates_generation_where_that_is_faster(staleness: int) -> None:
    def searched(max_staleness: int) -> tuple[tuple[int, ...], float]:
        n_steps = N_STEPS + N_STEPS_AHEAD * max_staleness
        problem = Problem(GRAPH, OPTIONS, 2, 4, 1.0, max_staleness=max_staleness, n_steps=n_steps)
        found = search(problem)
        assert PythonEvaluator(problem).evaluate(found.choice)[0] == found.seconds
        return found.choice, found.seconds

    (gen, _, train), seconds = searched(0)
    assert (gen, train, seconds) == (BOTH, BOTH, 6.0)
    choice, seconds = searched(staleness)
    assert seconds == 4.0 and choice in ((LEFT, RIGHT, RIGHT), (RIGHT, LEFT, LEFT))


def test_a_planner_gains_by_staleness() -> None:
    planner = ppo_planner(4, actor=WIDE)
    fresh, stale = (replace(planner, max_staleness=s) for s in (0, 1))
    plans = {name: one.search().plan for name, one in (("fresh", fresh), ("stale", stale))}
    assert stale.predict(plans["stale"]).seconds <= stale.predict(plans["fresh"]).seconds * (1 + 1e-9)
