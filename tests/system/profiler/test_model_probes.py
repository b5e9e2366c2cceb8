"""Reduced models keep whole block patterns; probes report their counts."""

from dataclasses import replace

import pytest
import torch

from realhf.api.layout import ParallelStrategy
from realhf.api.model_config import ModelConfig
from realhf.models.transformer import SINGLE_RANK_GROUP
from realhf.plan.compile.check import strategy_problems
from realhf.system.profiler.model_probes import (
    ProbeContext,
    batch_of,
    memory_points,
    model_probes,
    reduced_depths,
    spread_lengths,
    warm_up,
)
from realhf.system.profiler.probes import Clock

SMALL = ModelConfig("llama", 4, 32, 4, 2, 8, 64, 64, 100)
CONTEXT = ProbeContext.of(SINGLE_RANK_GROUP, Clock(torch.device("cpu"), 1, 1), bf16=False)


def test_depths_of_equal_blocks() -> None:
    small, large = reduced_depths(SMALL, 1, 3)
    assert (small.n_layers, large.n_layers, small.sliding_windows, small.head) == (1, 3, (), "lm")


def test_window_patterns_are_kept_whole() -> None:
    alternating = ModelConfig("gemma2", 6, 32, 4, 2, 8, 64, 64, 100, sliding_windows=(8, 0) * 3)
    small, large = reduced_depths(alternating, 1, 3)
    assert (small.sliding_windows, large.sliding_windows) == ((8, 0), (8, 0) * 2)


def test_periods_of_linear_attention_are_kept_whole() -> None:
    hybrid = ModelConfig("qwen3_next", 8, 32, 4, 2, 8, 64, 64, 100, delta_layers=(0, 1, 2, 4, 5, 6))
    small, large = reduced_depths(hybrid, 1, 5)
    assert (small.delta_layers, small.n_layers, large.delta_layers) == ((0, 1, 2), 4, hybrid.delta_layers)


def test_exceptional_blocks_are_dropped() -> None:
    routed = ModelConfig("qwen3_moe", 5, 32, 4, 2, 8, 64, 64, 100, n_experts=4, experts_per_token=2,
                         expert_intermediate=16, dense_layers=(0,))  # fmt: skip
    small, large = reduced_depths(routed, 2, 6)
    assert (small.dense_layers, large.dense_layers, small.n_layers, large.n_layers) == ((), (), 2, 6)
    assert not strategy_problems(small, ParallelStrategy(tp=2))


def test_spread_lengths_and_batches() -> None:
    assert spread_lengths(3, 4, 8) == [4, 6, 8] and spread_lengths(1, 5, 9) == [5]
    batch = batch_of([4, 6], 10, torch.device("cpu"))
    assert batch.lengths("tokens") == (4, 6) and int(batch["tokens"].max()) < 10


def test_probes_run_and_report_counts() -> None:
    warm_up(CONTEXT)
    probes = list(model_probes(CONTEXT, SMALL))
    for probe in probes:
        assert len(probe.run()) == len(probe.works)
    counts = [counts for probe in probes for name, counts in probe.works if name == "train_backward"]
    assert {c["block"] for c in counts} == {1, 3}
    assert any(c["block token"] == 3 * 8 * 64 and c["lm token"] == 8 * 32 for c in counts)  # half have no loss
    ends = {tuple(name for name in ("first", "lm", "scalar") if name in c) for c in counts}
    assert ends == {("first", "lm"), ("first", "scalar"), ("first",), ()}


@pytest.mark.slow
def test_saved_activations_grow_with_tokens_and_blocks() -> None:
    """The model is large because resident memory is coarse and fragmented."""
    model = replace(SMALL, hidden=256, n_heads=4, n_kv_heads=4, head_dim=64, intermediate=768)
    points = memory_points(CONTEXT, model)
    kept = {(p.counts["block"], p.counts["stage row"], "lm" in p.counts): p.low for p in points["kept_bytes"]}
    few, more, deep = kept[2, 8, True], kept[2, 48, True], kept[6, 8, True]  # 512 and 1,536 tokens
    assert few > 2 * 512 * 4 * 256 * 10 and 2 * few < more < 5 * few and 2 * few < deep < 5 * few  # three times as much
    assert set(points) == {"kept_bytes", "train_bytes", "forward_bytes"}
