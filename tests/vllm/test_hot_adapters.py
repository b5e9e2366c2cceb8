"""vLLM samples with the trainer's adapters beside the base; its log-probabilities equal those of the native engine."""

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GemmaConfig,
    GemmaForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from realhf.api.config import GenerationConfig, LoraOptions, ModelSpec
from realhf.base.errors import RunFailed
from realhf.models.engine import NativeEngine, VllmEngine
from tests.vllm.model import engine_of, prompts_of, vllm_on
from tests.vllm.test_adapters import SIZES
from tests.vllm.test_engine import LENGTHS, max_difference

pytestmark = [pytest.mark.slow, pytest.mark.vllm]
PLAIN = GenerationConfig(max_new_tokens=14)
HEADS = {**SIZES, "head_dim": 32}
MODELS: dict[str, tuple[type, type]] = {
    "llama": (LlamaForCausalLM, LlamaConfig),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config),
    "mistral": (MistralForCausalLM, MistralConfig),
    "gemma": (GemmaForCausalLM, GemmaConfig),
    "gemma2": (Gemma2ForCausalLM, Gemma2Config),
}
ATTENTION = ("q_proj", "v_proj")


def folder_of(family: str, root: Path) -> Path:
    torch.manual_seed(0)
    model, config = MODELS[family]
    sizes = SIZES if family in ("llama", "qwen2") else HEADS
    found: PreTrainedModel = model(config(**sizes))
    found.save_pretrained(root / family)
    return root / family


def adapted(folder: Path, rank: int = 4, alpha: float = 6.0, targets: tuple[str, ...] = ()) -> NativeEngine:
    lora = LoraOptions(rank=rank, alpha=alpha, targets=list(targets))
    engine = engine_of(ModelSpec(str(folder), lora=lora))
    return trained(engine, 0)


def trained(engine: NativeEngine, version: int) -> NativeEngine:
    """Change the adapters as training steps do."""
    noise = torch.randn(len(engine.params.data), generator=torch.Generator().manual_seed(version))
    with torch.no_grad():
        engine.params.data.add_(noise, alpha=0.05)
    return engine


@pytest.mark.parametrize(
    "family, rank, targets",
    [("llama", 16, ()), ("qwen2", 4, ATTENTION), ("qwen3", 4, ()), ("qwen3", 16, ATTENTION)]
)
def test_log_probabilities_equal_the_native_engine(
    family: str, rank: int, targets: tuple[str, ...], tmp_path: Path
) -> None:
    engine = adapted(folder_of(family, tmp_path), rank, targets=targets)
    vllm = vllm_on(engine, tmp_path / "actor")
    assert vllm.server is not None and vllm.served is engine.model.base
    for version in range(3):
        trained(engine, version + 1)
        responses = replace(vllm, version=version, verify=True).generate(prompts_of(LENGTHS), PLAIN, 3, seed=5)
        assert max_difference(engine, responses) < 1e-4
    vllm.server.close()
