"""Which calls get rows of rollouts ahead of training for later calls."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from realhf.api.execution_plan import ExecutionPlan, Placement
from realhf.api.graph import MFC, Graph, InterfaceSpec, Kind
from realhf.plan.compile.forwarding import busy_ranks, forwarded_keys
from realhf.plan.compile.transfer import RowHolders
from tests.plan.search.planners import layout

SPEC = InterfaceSpec("any")
GEN = MFC("gen", "actor", Kind.GENERATE, SPEC, ("prompts",), ("tokens", "logprobs", "truncated"))
REW = MFC("rew", None, Kind.INFERENCE, SPEC, ("tokens", "row"), ("rewards",))
REF = MFC("ref", "ref", Kind.INFERENCE, SPEC, ("tokens",), ("ref",))
VALUES = MFC("values", "critic", Kind.INFERENCE, SPEC, ("tokens", "truncated"), ("values",))
READ = ("tokens", "logprobs", "truncated", "prompts", "rewards", "ref", "values")
TRAIN = MFC("train", "actor", Kind.TRAIN, SPEC, READ)
CRITIC = MFC("critic_train", "critic", Kind.TRAIN, SPEC, (*READ, "row"))
GRAPH = Graph((GEN, REW, REF, VALUES, TRAIN, CRITIC))


def plan(**workers: int) -> ExecutionPlan:
    return ExecutionPlan(4, {m.name: Placement(layout("d1", workers.get(m.name, 1))) for m in GRAPH.mfcs})


def test_the_first_call_on_the_mesh_of_a_later_one_gets_its_rows() -> None:
    assert forwarded_keys(GRAPH, plan(gen=0), 1) == {"rew": ("truncated", "logprobs", "prompts")}
    apart = plan(gen=0, train=2, critic_train=2, ref=2, values=3)
    assert forwarded_keys(GRAPH, apart, 1) == {
        "rew": ("truncated",),
        "ref": ("logprobs", "truncated", "prompts", "row"),
    }


@pytest.mark.parametrize(
    ("staleness", "workers"),
    [
        (0, {"gen": 0}),  # the workers of a rollout wait for training
        (1, {"gen": 1}),  # all calls are on the workers of the rollout
        (2, {"gen": 0, "rew": 0, "ref": 0}),  # other calls start later
    ],
)
def test_nothing_is_forwarded_in_vain(staleness: int, workers: dict[str, int]) -> None:
    assert forwarded_keys(GRAPH, plan(**workers), staleness) == {}


def test_a_divided_rollout_is_as_one_ahead_of_training() -> None:
    graph = Graph(tuple(replace(m, batch_size=2 if m == GEN else 4) for m in GRAPH.mfcs))
    assert forwarded_keys(graph, plan(gen=0), 0) == forwarded_keys(GRAPH, plan(gen=0), 1)
    assert busy_ranks(graph, plan(gen=2), 0) == {2}


def test_a_call_that_needs_recent_weights_is_no_courier() -> None:
    graph = Graph((GEN, VALUES, replace(CRITIC, inputs=("values", "tokens", "logprobs"))))
    placed = ExecutionPlan(2, {m.name: Placement(layout("d1", m.name != "gen")) for m in graph.mfcs})
    assert forwarded_keys(graph, placed, 1) == {}


def test_busy_workers_are_those_of_rollouts_ahead() -> None:
    assert busy_ranks(GRAPH, plan(gen=2), 1) == {2} and busy_ranks(GRAPH, plan(gen=2), 0) == frozenset()


@given(st.lists(st.integers(0, 7), min_size=1, unique=True), st.sets(st.integers(0, 7)), st.sets(st.integers(8, 15)))
def test_a_sender_holds_the_rows_and_is_not_busy_if_possible(
    held: list[int], busy: set[int], replica: set[int]
) -> None:
    present, after = RowHolders(tuple(held)).with_replica(tuple(replica), frozenset(replica), {2, 3}, busy)
    assert present[0] in held and set(after.ranks) == replica | set(held)
    if held[0] not in busy:
        assert present[0] == held[0]
    elif free := set(held) - busy:
        assert present[0] in (free & {2, 3} or free)
