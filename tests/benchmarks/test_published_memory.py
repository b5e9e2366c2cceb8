"""Published memory against hand computations, and that every point is compared."""

from dataclasses import replace

import pytest

from benchmarks.bench_published import POINTS, points
from benchmarks.published_engines import MEMORY
from benchmarks.published_memory import (
    Point,
    cost_balanced_layers,
    half_of_outputs_numel,
    predicted_bytes,
    ratio,
    training_bytes,
)
from benchmarks.published_models import model_of

MEASURED = [point for point in points([POINTS]) if point["kind"] == "memory"]
LLAMA_3B = {"family": "llama", "layers": 28, "hidden": 3072, "heads": 32, "kv_heads": 32, "intermediate": 8192,
            "vocab": 131072, "tied": True}  # fmt: skip
NUMEL = 131072 * 3072 + 28 * (4 * 3072**2 + 3 * 3072 * 8192 + 2 * 3072) + 3072
PLAIN = replace(MEMORY["nanotron"], pass_gradients=0, reduction=0, reduced=0, balances_head=False)


def trained(**conditions: object) -> Point:
    return {"engine": "nanotron", "model": LLAMA_3B, "seq": 4096, "dp": 1, "tp": 1, "pp": 1, "zero": 1,
            "micro_batch": 1, "recompute": "none", **conditions}  # fmt: skip


def test_every_point_is_compared() -> None:
    """The bounds are those of the engines that are known best: a trait or a point that changes by a fifth fails."""
    assert len(MEASURED) == 98
    ratios = {name: [ratio(point) for point in MEASURED if point["engine"] == name] for name in MEMORY}
    assert {name: len(found) for name, found in ratios.items()} == {"torchtitan": 4, "faster-transformer": 14,
                                                                    "nanotron": 80}  # fmt: skip
    for name, most in (("torchtitan", 0.1), ("faster-transformer", 0.1), ("nanotron", 1.0)):
        assert all(abs(found - 1) <= most for found in ratios[name])
    assert sum(abs(found - 1) <= 0.1 for found in ratios["nanotron"]) >= 48


def test_reducing_all_gradients_at_once() -> None:
    """64 replicas: per parameter 2 bytes of weights, 4 of gradients, 12 / 64 of state, copies of 4 + 4 and 4 / 64."""
    point = trained(dp=64)
    assert predicted_bytes(point) * 0.95 == pytest.approx(NUMEL * (2 + 4 + 8 + (12 + 4) / 64), rel=1e-9)


def test_a_micro_batch_of_one_stage() -> None:
    """Without other copies: what 28 blocks and the ends save, the temporaries of one, and logits with 8 bytes each."""
    block = 4 * 3072 + 2 * 3072 + 2 * 3072 + 4 * 8192  # norms and their inputs; queries, output; keys, values; MLP
    temporary = 3 * 3072 + 1.5 * 2 * 8192
    activations = 4096 * (2 * (28 * block + 5 * 3072 + temporary) + 8 * 131072)
    assert training_bytes(trained(), PLAIN) == NUMEL * 18 + activations
    assert training_bytes(trained(zero=0), PLAIN) == NUMEL * 18 + activations
    assert training_bytes(trained(zero=0, dp=8), PLAIN) == NUMEL * 20 + activations  # buckets
    assert training_bytes(trained(dp=8), PLAIN) == NUMEL * (6 + 12 / 8) + activations
    two = training_bytes(trained(micro_batch=2), PLAIN)
    assert two == NUMEL * 18 + 2 * activations + 2 * 4096 * 2 * 28 * 3072  # attention's output again


def test_tensor_parallelism_saves_gathered_inputs() -> None:
    model = model_of(trained())
    whole, half = (training_bytes(trained(tp=tp, sequence_parallel=tp > 1), PLAIN) for tp in (1, 2))
    # two norms' outputs are gathered; embedded tokens and temporaries of the hidden size are counted whole
    assert half - (whole + 2 * 4096 * (2 * 28 + 5 + 3) * 3072) / 2 == pytest.approx(18 * 57 * 3072 / 2)
    assert model.tied_embedding


def test_stages_end_with_the_layer_that_reaches_their_share() -> None:
    """The head counts 3.6 blocks: of 31.6, a quarter is 7.9."""
    model = model_of(trained())
    assert cost_balanced_layers(model, 4) == (range(0, 9), range(9, 17), range(17, 25), range(25, 30))
    for pp in (1, 2, 8, 16):
        stages = cost_balanced_layers(model, pp)
        assert len(stages) == pp and [layer for stage in stages for layer in stage] == list(range(30))


def test_outputs_that_selective_recomputation_saves() -> None:
    model = model_of({"model": {**LLAMA_3B, "kv_heads": 8}})
    assert half_of_outputs_numel(model, 1) == 3072 + 8 * 96 + 3072 + 8192 + 3072  # q, v, attention, gate, down
    assert half_of_outputs_numel(model, 2) == (3072 + 8 * 96 + 3072 + 8192) / 2 + 3072


def test_generation() -> None:
    """Weights, cache and logits of the batch, buffers of all prompt tokens, scores in 2 and in 4 bytes, a context."""
    fields = {"family": "gpt3", "layers": 2, "hidden": 64, "heads": 4, "kv_heads": 4, "intermediate": 256, "vocab": 100}
    point = {"engine": "faster-transformer", "mode": "generate", "model": fields, "tp": 1, "batch": 3, "prompt": 10,
             "new": 5}  # fmt: skip
    numel = 2 * 100 * 64 + 2 * (4 * 64**2 + 2 * 64 * 256 + 2 * 64) + 64
    cache = 3 * 15 * 2 * 2 * 64 * 2
    buffers, scores = 3 * 10 * 17 * 64 * 2, 3 * 4 * 10 * 11 * 6
    assert predicted_bytes(point) == 2 * numel + cache + buffers + scores + 3 * 100 * 8 + 1e9
