"""Models whose blocks a kernel decodes sample the same responses in every layout, which share the cache of a prompt."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from realhf.models.fused.fused_blocks import FusedBlocks
from tests.models.layout_checks import starts_of
from tests.models.sharding import N_SAMPLES, Results, collect
from tests.models.tiny_models import FUSED, WITH_EXPERTS, load_model
from tests.scaling import pairs, spread

pytestmark = [pytest.mark.dist, pytest.mark.slow]
OTHERS, DIVIDED = ("t2", "p2", "t2p2", "d2t2", "t4"), ("t2e2", "t4e2")
ROUTED = tuple(name for name in FUSED if name.removeprefix("fused ") in WITH_EXPERTS)
DENSE = tuple(name for name in FUSED if name not in ROUTED)
PADDING = 0
"""Its embedding is zero, so all experts have equal scores."""
LAYOUTS = spread(DENSE, OTHERS, 3) | spread(ROUTED, (*OTHERS, *DIVIDED), 3)
CASES = pairs(LAYOUTS)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fused_layouts")


@pytest.fixture(scope="module")
def results(on_ranks: Callable[..., list[Any]], root: Path) -> Results:
    starts, collected = starts_of(tuple(FUSED), root), Results()
    names = {model: ("whole", *layouts) for model, layouts in LAYOUTS.items()}
    for models in (DENSE, ROUTED):
        collect(on_ranks, 4, {name: starts[name] for name in models}, names, root, collected)
    return collected


def test_kernels_decode_these_models(root: Path, results: Results) -> None:
    for name in FUSED:
        fused = load_model(root / name / "whole" / "saved").weights.fused
        assert isinstance(fused, FusedBlocks)
        assert fused.is_whole == (name not in ("fused qwen3_next", "fused deepseek_v3"))


@pytest.mark.parametrize("model, layout", CASES)
def test_every_worker_samples_the_same_responses(model: str, layout: str, results: Results) -> None:
    (whole,), members = results[model, "whole"], results[model, layout]
    assert len(whole.sampled) % N_SAMPLES == 0 and whole.sampled
    for member in members:
        assert member.sampled
        for row, tokens in member.sampled.items():
            assert torch.equal(tokens, whole.sampled[row])
            assert torch.allclose(member.sampled_logprobs[row], whole.sampled_logprobs[row], atol=1e-4)
            if whole.sampled_experts is not None:
                of_tokens = (one.sampled_experts[row].view(len(tokens), -1) for one in (member, whole))
                found, expected = (experts[tokens != PADDING].sort(-1).values for experts in of_tokens)
                assert torch.equal(found, expected)


@pytest.mark.parametrize("model, layout", CASES)
def test_rows_read_the_cache_of_their_prompt(model: str, layout: str, results: Results) -> None:
    """Not in stages with sliding windows, and not with states, latents, or norms over the heads of all ranks."""
    windowed, own = {"fused gemma2", "fused olmo3", "fused gpt_oss"}, {"fused qwen3_next", "fused deepseek_v3"}
    if model in own or ("t" in layout and model in ("fused olmo3", "fused olmoe")):
        expected = {False}
    elif model in windowed:  # one of two stages has the layer with a window
        expected = {True, False} if "p2" in layout else {False}
    else:
        expected = {True}
    assert {member.shares_prompts for member in results[model, layout]} == expected
