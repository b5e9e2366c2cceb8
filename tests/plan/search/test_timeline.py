"""Predictions compared with values computed by hand."""

import pytest

from realhf.api.execution_plan import ExecutionPlan, Placement
from realhf.api.machine import Cost, Workload
from realhf.api.program import Compute, Instruction, Reallocate
from realhf.plan.cost.memory import Bytes
from realhf.plan.search.simulate import simulate
from realhf.plan.search.timeline import Prediction
from realhf.plan.train_schedule import TrainSchedule
from tests.plan.search.planners import layout, ppo_planner

SECONDS = {"actor_gen": 4.0, "rew_inf": 1.0, "ref_inf": 2.0, "critic_inf": 1.0, "critic_train": 3.0, "actor_train": 6.0}


def price(call: object, instruction: Instruction) -> Cost:
    match instruction:
        case Compute(mfc):
            return Cost(SECONDS[mfc], SECONDS[mfc])
        case Reallocate():
            return Cost(0.5, 0.0)
        case _:
            return Cost(0.0, 0.0)


def prediction(places: dict[str, tuple[str, int]], max_staleness: int = 0, latency: float = 0.0) -> Prediction:
    graph = ppo_planner().graph
    plan = ExecutionPlan(2, {m.name: Placement(layout(*places.get(m.name, ("d2", 0)))) for m in graph.mfcs})
    n = 4 + max_staleness
    length = TrainSchedule(8, 8 * n, n)
    timeline = simulate(graph, plan, price, length, Workload(((3,),), (4,)), latency,
                        max_staleness=max_staleness)  # fmt: skip
    return Prediction(timeline, {0: Bytes(weights=3.0, runtime=1.0), 1: Bytes(weights=5.0)})


def test_sequential_calls() -> None:
    found = prediction({})
    assert found.seconds == sum(SECONDS.values()) == 17.0 and found.peak == 5.0
    assert found.call_seconds == {name: (seconds, 0.0) for name, seconds in SECONDS.items()}
    assert found.critical_shares == pytest.approx({name: seconds / 17 for name, seconds in SECONDS.items()})


def test_transfers_are_separate_from_compute() -> None:
    found = prediction({"actor_gen": ("t2", 0)})
    assert found.call_seconds["actor_gen"] == (4.0, 0.5) and found.seconds == 17.5


def test_a_shorter_parallel_call_is_not_on_the_critical_path() -> None:
    found = prediction({"critic_train": ("d1", 1), "critic_inf": ("d1", 1), "actor_train": ("d1", 0),
                        "actor_gen": ("d1", 0), "ref_inf": ("d1", 0), "rew_inf": ("d1", 1)})  # fmt: skip
    assert found.seconds == 4 + 2 + 6  # the worker of the critic is faster
    shares = found.critical_shares
    assert (shares["actor_gen"], shares["actor_train"]) == (pytest.approx(4 / 12), pytest.approx(6 / 12))
    assert shares.get("critic_train", 0.0) == 0.0 and sum(shares.values()) == pytest.approx(1.0)


def test_latency_of_the_master_is_on_no_call() -> None:
    found = prediction({}, latency=0.5)
    waits = found.seconds - 17
    assert waits > 0 and sum(found.critical_shares.values()) == pytest.approx(17 / found.seconds)


@pytest.mark.parametrize("max_staleness", [1, 2])
def test_shares_refer_to_the_steady_state(max_staleness: int) -> None:
    found = prediction({"actor_gen": ("d1", 1), "critic_train": ("d1", 0), "actor_train": ("d1", 0)}, max_staleness)
    assert 0 < sum(found.critical_shares.values()) <= 1 + 1e-9
