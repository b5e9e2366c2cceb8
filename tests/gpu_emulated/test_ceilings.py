"""Ceilings on waits, copies and launches of a pass. They are measured, so that a change that adds one is noticed."""

import json
from pathlib import Path
from typing import NamedTuple

import pytest

from realhf.api.config import GenerationConfig
from realhf.models.engine.native import NativeEngine
from realhf.plan.machines.roofline import LAUNCHES
from tests.gpu_emulated.conftest import FAMILIES
from tests.gpu_emulated.fake_cuda import FakeCuda
from tests.gpu_emulated.fake_runtime import fake_cuda
from tests.models.engine.tiny_engine import counted, engine_on, nll, prompts_of, rows_of

LAUNCHES_PER_LAYER = {
    # inference in float32 and bfloat16, training in float32 and bfloat16; attention of these few rows included
    "llama": (26, 26, 88, 88),
    "qwen3": (42, 50, 141, 161),
    "gpt2": (14, 10, 52, 42),
    "gemma2": (108, 128, 300, 348),
    "qwen3_moe": (67, 68, 238, 235),
}
KERNELS_PER_DECODED_LAYER = {
    "llama": (29, 28), "qwen3": (45, 53), "gpt2": (17, 12), "gemma2": (52, 64), "qwen3_moe": (0, 71),
}  # fmt: skip
"""In a captured step, in float32 (0: not captured) and bfloat16, without the fused kernels of csrc."""
WAITS = {"inference": 0, "training": 3}
"""Training reads losses and statistics, the tokens with a gradient, and the gradient norm."""
ROUTER_WAITS = {"inference": 0, "training": 1}
"""Of a pass; without a grouped product, each routed layer also waits for the number of tokens of every expert."""
PINNED_COPIES = 3
"""Of the index tensors of a pass."""


class Counts(NamedTuple):
    launches: int
    waits: int
    pinned_copies: int


def deeper(folder: Path, n_layers: int, target: Path) -> Path:
    """Write the configuration of a folder's model with another number of layers."""
    config = json.loads((folder / "config.json").read_text())
    config["n_layer" if "n_layer" in config else "num_hidden_layers"] = n_layers
    if "layer_types" in config:
        config["layer_types"] = (config["layer_types"] * n_layers)[:n_layers]
    target.mkdir()
    (target / "config.json").write_text(json.dumps(config))
    return target


def count(cuda: FakeCuda, engine: NativeEngine, kind: str) -> Counts:
    rows = rows_of((5, 9, 2, 7), per_prompt=2)
    there = rows.to("cuda:0")
    cuda.events.clear()
    if kind == "inference":
        engine.forward(there, lambda outputs, _: outputs.logprobs(1.0))
    else:
        engine.train(there, nll, counted(rows))
    return Counts(cuda.n_launches, cuda.n_waits, cuda.count("copy from pinned memory"))


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
        assert per_pass[2] <= PINNED_COPIES + 3 * shares_prefixes


@pytest.mark.parametrize("family", KERNELS_PER_DECODED_LAYER)
@pytest.mark.parametrize("bf16", [False, True])
def test_ceilings_of_a_captured_step(family: str, bf16: bool, folders: dict[str, Path], tmp_path: Path) -> None:
    found = []
    for n_layers in (2, 4):
        folder = deeper(folders[family], n_layers, tmp_path / str(n_layers))
        with fake_cuda():
            engine = engine_on(folder, trained=False, device="cuda:0", bf16=bf16, init_from_scratch=True)
            engine.generate(prompts_of((3,)).to("cuda:0"), GenerationConfig(max_new_tokens=2, max_num_seqs=2), 2, 11)
            decoder = engine.pipeline.kept_decoder._decoder
            assert decoder is not None
            found.append([len(step.graph.steps) for step in decoder._captured.values()])  # type: ignore[attr-defined]
    ceiling = KERNELS_PER_DECODED_LAYER[family][bf16]
    if not ceiling:
        assert found == [[], []]
        return
    (shallow,), (deep,) = found
    assert (deep - shallow) / 2 <= ceiling


def test_the_planner_prices_these_launches() -> None:
    for kind, family in (("dense", "llama"), ("routed", "qwen3_moe")):
        _, inference, _, training = LAUNCHES_PER_LAYER[family]
        assert LAUNCHES[kind] == (inference, training, KERNELS_PER_DECODED_LAYER[family][1])
