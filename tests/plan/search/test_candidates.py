"""Candidates: the fastest micro-batching that fits, and its cost."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from realhf.api.batch_meta import PROMPT
from realhf.api.execution_plan import MicroBatching, Placement
from realhf.api.graph import Kind
from realhf.api.layout import DeviceMesh, Layout, ParallelStrategy
from realhf.api.machine import Workload
from realhf.plan.search.candidates import MIN_MICRO_BATCH_TOKENS, MIN_NUM_SEQS, Candidates
from tests.plan.search.planners import LLAMA, TOY, layout, ppo_planner
from tests.scaling import examples

LONG = Workload(((100,),), (300,))
STRATEGIES = ("d1", "d2", "t2", "p2", "d2p2", "d4", "t2p2")


def calls_with(memory: float = 1e9, **options: object) -> Candidates:
    hardware = replace(TOY, memory=memory / (1 - TOY.reserve_fraction))
    return ppo_planner(hardware=hardware, workload=LONG, batch=32, **options).calls  # type: ignore[arg-type]


@pytest.mark.parametrize("text", STRATEGIES)
@pytest.mark.parametrize("cores", [0, 2])
def test_candidates_have_the_cost_of_the_call(text: str, cores: int) -> None:
    calls = calls_with()
    calls = replace(calls, hardware=replace(calls.hardware, cores=cores))
    for mfc in calls.cost.graph.mfcs:
        found = calls.of(mfc, layout(text))
        rows = calls.rows(mfc, layout(text).strategy.dp)
        exact = calls.cost.compute(mfc, found.placement, rows)
        if cores:
            assert found.cost == exact
        else:  # computed from the busiest rank of every mini-batch
            assert found.cost.seconds == pytest.approx(exact.seconds, rel=1e-6)
        taken = calls.memory.transient(mfc, found.placement, rows, layout(text)).total
        assert found.transient == taken and found.bytes == taken + found.resident
        assert found.resident == calls.memory.resident(mfc.role or "", layout(text).strategy).total


@settings(max_examples=examples(40))
@given(st.lists(st.integers(1, 200), min_size=4, max_size=64), st.integers(1, 4), st.sampled_from(["d2", "d4", "d8"]))
def test_generation_costs_the_time_of_the_slowest_replica(lengths: list[int], samples: int, text: str) -> None:
    calls = ppo_planner(8, workload=Workload(((16,), (10,)), tuple(lengths), samples), batch=16).calls
    gen = calls.cost.graph["actor_gen"]
    found, rows = calls.of(gen, layout(text)), calls.rows(gen, layout(text).strategy.dp)
    exact = calls.cost.compute(gen, found.placement, rows).seconds
    assert 0.9 * exact <= found.cost.seconds <= exact * (1 + 1e-9)
    longest = max(max(calls.cost.sampled(gen, replica)) for replica in rows)
    busiest = max(
        rows, key=lambda r: (max(calls.cost.sampled(gen, r)), sum(calls.cost.sampled(gen, r)) + sum(r.lengths))
    )
    assert found.cost.seconds >= calls.cost.compute(gen, found.placement, [busiest]).seconds > 0 < longest


def test_the_configured_micro_batching_is_kept_if_it_fits() -> None:
    calls = calls_with()
    for mfc in calls.cost.graph.mfcs:
        assert calls.of(mfc, layout("d2")).placement.micro_batching == MicroBatching(1, 4096)


def test_micro_batches_and_sequences_shrink_until_they_fit() -> None:
    calls = calls_with()
    train, gen = calls.cost.graph["actor_train"], calls.cost.graph["actor_gen"]
    for mfc in (train, gen):
        large = calls.of(mfc, layout("d1"))
        tight = calls_with(memory=large.bytes + calls.memory.runtime - 1)
        small = tight.of(mfc, layout("d1"))
        assert small.bytes <= tight.capacity < large.bytes
        batching = small.placement.micro_batching
        if mfc is train:
            assert MIN_MICRO_BATCH_TOKENS <= batching.max_tokens_per_mb < 4096 and batching.max_num_seqs == 0
        else:
            assert MIN_NUM_SEQS <= batching.max_num_seqs < 32 and batching.max_tokens_per_mb == 4096


def test_if_nothing_fits_the_smallest_is_returned() -> None:
    calls = calls_with(memory=2e6)
    found = calls.of(calls.cost.graph["actor_train"], layout("d1"))
    assert found.bytes > calls.capacity and found.placement.micro_batching.max_tokens_per_mb == MIN_MICRO_BATCH_TOKENS


def test_pipelines_use_smaller_micro_batches_if_faster() -> None:
    calls = calls_with()
    train = calls.cost.graph["actor_train"]
    found = calls.of(train, layout("p4"))
    given = calls.cost.compute(train, Placement(layout("p4"), MicroBatching(1, 4096)), calls.rows(train, 1))
    assert found.cost.seconds <= given.seconds


def test_layouts_across_nodes_cost_more() -> None:
    calls = calls_with()
    train = calls.cost.graph["actor_train"]
    inside, across = calls.of(train, layout("d2", 4)), calls.of(train, layout("d2", 3))
    assert inside.cost.seconds < across.cost.seconds
    assert calls.of(train, layout("d2", 0)).cost == inside.cost and inside.placement.layout == layout("d2", 4)
    apart = Layout(DeviceMesh((0, 5)), ParallelStrategy(2))  # the same size and first rank, with a gap
    assert calls.of(train, apart).cost.seconds == pytest.approx(across.cost.seconds)
    assert calls.of(train, layout("d2", 0)).cost == inside.cost


@settings(max_examples=examples(60))
@given(st.integers(1, 9), st.sampled_from(["actor_gen", "ref_inf", "actor_train"]), st.integers(1, 3))
def test_rows_of_a_step(dp: int, name: str, samples: int) -> None:
    workload = Workload(((16,), (10,), (13,)), (24, 12), samples)
    calls = ppo_planner(workload=workload, batch=7).calls
    mfc = calls.cost.graph[name]
    ranks = calls.rows(mfc, dp)
    ids = sorted(i for rows in ranks for i in rows.ids)
    assert len(ranks) == dp and len(set(ids)) == len(ids) == 7 * (1 if mfc.kind is Kind.GENERATE else samples)
    assert {i.sample for i in ids} == ({PROMPT} if mfc.kind is Kind.GENERATE else set(range(samples)))
    known = dict(pair for p in range(7) for pair in (*workload.dataset_rows(p), *workload.sampled_rows(p)))
    assert all(known[i] == n for rows in ranks for i, n in zip(rows.ids, rows.lengths, strict=True))
    assert {number for rows in ranks for number in rows.minibatches} == set(range(mfc.n_minibatches))


def test_rows_of_a_part_of_a_step() -> None:
    calls = ppo_planner(batch=8).calls
    half = replace(calls.cost.graph["ref_inf"], batch_size=4)
    assert sum(len(rows.ids) for rows in calls.rows(half, 2)) == 4


def test_capacity_excludes_the_runtime() -> None:
    assert calls_with(5e7).capacity == pytest.approx(5e7 - TOY.reserved) and LLAMA.n_layers == 4
