"""Ceilings on waits, copies and launches of a pass. They are measured, so that a change that adds one is noticed."""

from pathlib import Path

import pytest

from realhf.plan.machines.launches import counted_launches
from tests.gpu_emulated.conftest import FAMILIES
from tests.gpu_emulated.count_launches import COUNTED, Counts, captured_steps, count, deeper, launches_of
from tests.gpu_emulated.fake_runtime import fake_cuda
from tests.models.engine.tiny_engine import engine_on
from tests.models.tiny_models import hf_model

LAUNCHES_PER_LAYER = {
    # inference in float32 and bfloat16, training in float32 and bfloat16; attention of these few rows included
    "llama": (26, 26, 88, 88),
    "qwen3": (42, 50, 141, 161),
    "gpt2": (14, 10, 52, 42),
    "gemma2": (108, 128, 300, 348),
    "qwen3_moe": (67, 68, 241, 238),  # training counts the tokens of experts
    "qwen3_5_text": (100, 100, 280, 280),
}
KERNELS_PER_DECODED_LAYER = {
    "llama": (29, 28), "qwen3": (45, 53), "gpt2": (17, 12), "gemma2": (52, 64), "qwen3_moe": (0, 71),
    "qwen3_5_text": (80, 80),
}  # fmt: skip
"""In a captured step, in float32 (0: not captured) and bfloat16, without the fused kernels of csrc."""
WAITS = {"inference": 1, "training": 4}
"""The head reads which tokens it computes; training losses and statistics, the tokens with a gradient, and its norm."""
ROUTER_WAITS = {"inference": 0, "training": 1}
"""Of a pass; without a grouped product, each routed layer also waits for the number of tokens of every expert."""
PINNED_COPIES = 3
"""Of the index tensors of a pass."""


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("bf16", [False, True])
def test_ceilings_of_a_pass(family: str, bf16: bool, folders: dict[str, Path], tmp_path: Path) -> None:
    found: dict[str, list[Counts]] = {kind: [] for kind in WAITS}
    for n_layers in (2, 4):
        folder = deeper(folders[family], n_layers, tmp_path / str(n_layers))
        with fake_cuda() as cuda:
            engine = engine_on(folder, device="cuda:0", bf16=bf16, init_from_scratch=True)
            for kind in WAITS:
                found[kind].append(count(cuda, engine, kind))
            shares_prefixes, is_routed = engine._shares_prefixes, family == "qwen3_moe"
            waits = engine.model.waits_for_experts
            assert waits == (is_routed and not bf16)
    for kind, (shallow, deep) in found.items():
        layer = [(b - a) / 2 for a, b in zip(shallow, deep, strict=True)]
        per_pass = [a - 2 * n for a, n in zip(shallow, layer, strict=True)]
        assert layer[0] <= LAUNCHES_PER_LAYER[family][2 * (kind == "training") + bf16]
        assert layer[1:] == [waits, 0], "no waits and no copies in a layer"
        # finding the shared prompts of rows reads the tokens
        assert per_pass[1] <= WAITS[kind] + is_routed * ROUTER_WAITS[kind] + shares_prefixes
        assert per_pass[2] <= PINNED_COPIES + 3 * shares_prefixes + (family == "qwen3_5_text")  # of chunks


@pytest.mark.parametrize("family", KERNELS_PER_DECODED_LAYER)
@pytest.mark.parametrize("bf16", [False, True])
def test_ceilings_of_a_captured_step(family: str, bf16: bool, folders: dict[str, Path], tmp_path: Path) -> None:
    found = [captured_steps(deeper(folders[family], n, tmp_path / str(n)), bf16) for n in (2, 4)]
    ceiling = KERNELS_PER_DECODED_LAYER[family][bf16]
    if not ceiling:
        assert found == [[], []]
        return
    (shallow,), (deep,) = found
    assert (deep - shallow) / 2 <= ceiling


@pytest.mark.slow
@pytest.mark.parametrize("family", COUNTED)
def test_the_planner_prices_these_launches(family: str, tmp_path: Path) -> None:
    hf_model(family).save_pretrained(folder := tmp_path / family)
    assert counted_launches()[family] == tuple(launches_of(folder, tmp_path))
