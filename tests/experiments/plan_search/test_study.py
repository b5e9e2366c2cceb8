"""Cases, gains and tables of the predicted study, and the memory of engines that repeat keys and values."""

from dataclasses import replace

import pytest

from experiments.plan_search.decoding import decoding_step
from experiments.plan_search.engines import ENGINES, OF_2024, OURS, VARIANTS
from experiments.plan_search.study import RULES, SEARCHED, Row, cases, mean_gain, of, table
from experiments.plan_search.workloads import DEVICES, SIZES, WEAK_SCALING, WORKLOADS, llama, planner_for
from realhf.api.layout import ParallelStrategy


def row(engine: str, workload: str, actor: str, devices: int, searched: float, **rules: float) -> Row:
    seconds = {**dict.fromkeys(RULES, 0.0), **rules, SEARCHED: searched}
    calls = {plan: {"actor_gen": s / 2} for plan, s in seconds.items()}
    layouts = dict.fromkeys(seconds, {"actor_gen": "d2t8p1@0-15"})
    return Row(engine, workload, actor, devices, seconds, calls, calls, layouts, "budget")


def test_every_workload_is_predicted_once_with_both_engines() -> None:
    found = cases()
    assert len(set(found)) == len(found) == 2 * 2 * 4 * 4 + len(VARIANTS) * 4
    for engine in ENGINES:
        sizes = {case[1:] for case in found if case[0] == engine}
        assert sizes == {(w, actor, n) for w in WORKLOADS for actor in SIZES for n in DEVICES}
    assert {case[1:] for case in found if case[0] in VARIANTS} == {("long", *size) for size in WEAK_SCALING.items()}


def test_gains_are_over_plans_that_fit() -> None:
    one = row("ours", "short", "7B", 16, 2.0, megatron=3.0, symmetric=2.5)
    assert (one.gain("megatron"), one.best_rule, one.gain("symmetric")) == (0.5, "symmetric", 0.25)
    assert one.gain("real") is None
    nothing = row("ours", "short", "70B", 16, 0.0)
    assert (nothing.best_rule, nothing.gain(""), nothing.gain("megatron")) == ("", None, None)
    assert row("ours", "short", "70B", 16, 0.0, megatron=3.0).gain("megatron") is None
    worse = row("ours", "short", "7B", 32, 2.0, megatron=2.0)
    assert mean_gain([one, nothing, worse]) == 0.25
    assert mean_gain([one, worse], "best") == 0.125


def test_the_table_has_every_row_by_workload_and_size() -> None:
    rows = [row(engine, workload, actor, n, 2.0, megatron=3.0) for engine, workload, actor, n in reversed(cases())]
    chosen = of(rows, "2024", "long", weak=True)
    assert [(one.actor, one.devices) for one in chosen] == list(WEAK_SCALING.items())
    text = table(rows)
    assert text.count("| +50% | megatron | +50% |") == 64
    assert all(engine.label in text for engine in {**ENGINES, **VARIANTS}.values())


@pytest.mark.parametrize(("size", "factor"), [("7B", 1), ("34B", 8)])
def test_repeated_keys_and_values_take_memory(size: str, factor: int) -> None:
    shared, repeated = (planner_for(size, 64, "long", engine) for engine in (OURS, OF_2024))
    plan = shared.by_heuristic("megatron")
    mfc = shared.graph["actor_gen"]
    rows = shared.calls.rows(mfc, plan[mfc.name].layout.strategy.dp)
    needed, more = (p.calls.memory.transient(mfc, plan[mfc.name], rows, None) for p in (shared, repeated))
    assert needed.kv_cache > 0
    assert more == replace(needed, kv_cache=factor * needed.kv_cache)


def test_costs_of_a_decoding_step() -> None:
    config = llama("7B")
    step = decoding_step(OURS, config, ParallelStrategy(2, 8, 1), 128, 4608)
    per_layer = 64 * 4608 * 2 * 4 * 128 * 2 / OURS.hardware.memory_bandwidth  # rows, tokens, K and V, heads, bf16
    assert step.cache * step.seconds == pytest.approx(32 * per_layer, rel=0.01)
    assert (step.launches, 0 < step.all_reduces < 1) == (0.0, True)  # a captured step
    assert decoding_step(OURS, config, ParallelStrategy(16, 1, 1), 128, 4608).all_reduces == 0.0
    eager = decoding_step(OF_2024, config, ParallelStrategy(2, 8, 1), 2, 16)
    assert eager.seconds == pytest.approx(32 * 29 * 6e-6, rel=0.15)  # launches, and the head
    assert eager.launches > 0.1
    staged = decoding_step(OF_2024, config, ParallelStrategy(1, 8, 2), 2, 16)  # two groups of one row, half the layers
    assert staged.seconds == pytest.approx(32 * 29 * 6e-6, rel=0.15)
    assert decoding_step(OF_2024, config, ParallelStrategy(2, 8, 1), 128, 7000).launches == 0.0
