"""vLLM samples with the trainer's adapters beside the base; its log-probabilities equal those of the native engine."""

import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GemmaConfig,
    GemmaForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
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
from realhf.models.engine import NativeEngine
from tests.vllm.model import engine_of, prompts_of, vllm_on
from tests.vllm.test_adapters import SIZES
from tests.vllm.test_engine import LENGTHS, check_turns, max_difference

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
    "gpt2": (GPT2LMHeadModel, GPT2Config),
}
GPT2 = {"n_embd": 128, "n_layer": 2, "n_head": 4, "vocab_size": 96, "n_positions": 256, "initializer_range": 0.1}
ATTENTION = ("q_proj", "v_proj")
CASES = [
    ("llama", 16, 32.0, ()),
    ("qwen2", 4, 6.0, ATTENTION),
    ("qwen3", 4, 6.0, ()),
    ("qwen3", 16, 24.0, ATTENTION),
    ("mistral", 1, 0.75, ("k_proj", "up_proj")),
    ("gemma", 9, 6.0, ("o_proj", "down_proj")),
    ("gemma2", 4, 6.0, ()),
]


def folder_of(family: str, root: Path) -> Path:
    torch.manual_seed(0)
    model, config = MODELS[family]
    sizes = SIZES if family in ("llama", "qwen2") else HEADS
    found: PreTrainedModel = model(config(**(GPT2 if family == "gpt2" else sizes)))
    found.save_pretrained(root / family)
    return root / family


def adapted(
    folder: Path, rank: int = 4, alpha: float = 6.0, targets: tuple[str, ...] = (), bf16: bool = False
) -> NativeEngine:
    lora = LoraOptions(rank=rank, alpha=alpha, targets=list(targets))
    return trained(engine_of(ModelSpec(str(folder), lora=lora, bf16=bf16)), 0)


def trained(engine: NativeEngine, version: int, step: float = 0.05) -> NativeEngine:
    """Change the adapters as training steps do."""
    noise = torch.randn(len(engine.params.data), generator=torch.Generator().manual_seed(version))
    with torch.no_grad():
        engine.params.data.add_(noise, alpha=step)
    return engine


@pytest.mark.parametrize("family, rank, alpha, targets", CASES)
def test_log_probabilities_equal_the_native_engine(
    family: str, rank: int, alpha: float, targets: tuple[str, ...], tmp_path: Path
) -> None:
    """The prompts are the same in every version, and two of them fill a block of the prefix cache."""
    engine = adapted(folder_of(family, tmp_path), rank, alpha, targets)
    vllm = vllm_on(engine, tmp_path / "actor")
    assert vllm.server is not None and vllm.served is engine.model.base and vllm.adapter
    assert all(len(tensor["slices"]) == 1 for tensor in vllm.adapter)
    prompts = prompts_of((*LENGTHS, 150, 150))
    for version in (0, 1, 3):
        responses = replace(vllm, version=version, verify=True).generate(prompts, PLAIN, 3, seed=5)
        assert max_difference(engine, responses) < 1e-4
        trained(engine, version + 1)
    assert max_difference(engine, responses) > 1e-3
    vllm.server.close()


def test_turns_versions_and_checksums(tmp_path: Path) -> None:
    engine = adapted(folder_of("qwen3", tmp_path))
    vllm = vllm_on(engine, tmp_path / "actor")
    assert vllm.server is not None
    check_turns(engine, vllm)
    trained(engine, 1)
    check_turns(engine, replace(vllm, version=1))
    trained(engine, 2)  # version 2 is not generated from
    trained(engine, 3)
    check_turns(engine, replace(vllm, version=3, verify=True))
    with pytest.raises(RunFailed, match=r"version 2 are requested, the engine has versions \[3\]"):
        vllm.server.call("sample_turns", version=2, rows=[])
    for changed in (engine.params.view("layers.1.wq.lora_b"), engine.model.base.view("layers.0.down")):
        changed[3, 2] += 1e-3
        with pytest.raises(RunFailed, match="vLLM of worker 0 has different weights from the trainer: checksums"):
            replace(vllm, version=3, verify=True).generate(prompts_of(LENGTHS), PLAIN, 1, seed=5)
        changed[3, 2] -= 1e-3
    os.kill(vllm.server._process.pid, signal.SIGKILL)
    with pytest.raises(RunFailed, match="ended by signal SIGKILL during load_adapter"):
        replace(vllm, version=4).generate(prompts_of(LENGTHS), PLAIN, 2, seed=5)
    vllm.server.close()


def test_temperature(tmp_path: Path) -> None:
    engine = adapted(folder_of("llama", tmp_path))
    vllm = vllm_on(engine, tmp_path / "actor", 0.7, pack=False)
    assert vllm.server is not None
    responses = vllm.generate(prompts_of(LENGTHS), replace(PLAIN, temperature=0.7), 2, seed=5)
    expected = engine.forward(responses.only(("tokens",)), lambda outputs, _: outputs.logprobs(0.7))
    assert float((responses["logprobs"] - expected)[responses["prompt_mask"] == 0].abs().max()) < 1e-4
    vllm.server.close()


@pytest.mark.parametrize("family, options", [("gpt2", {}), ("llama", {"merge_lora": True})])
def test_adapters_are_merged_on_request_or_if_vllm_has_none(
    family: str, options: dict[str, bool], tmp_path: Path
) -> None:
    engine = adapted(folder_of(family, tmp_path))
    vllm = vllm_on(engine, tmp_path / "actor", **options)
    assert vllm.server is not None and vllm.served is not engine.model.base and not vllm.adapter
    for version in range(2):
        responses = replace(vllm, version=version, verify=True).generate(prompts_of(LENGTHS), PLAIN, 3, seed=5)
        assert max_difference(engine, responses) < 1e-4
        trained(engine, version + 1)
    vllm.server.close()


def test_a_bfloat16_base(tmp_path: Path) -> None:
    engine = adapted(folder_of("llama", tmp_path), rank=16, alpha=5.3, bf16=True)
    vllm = vllm_on(engine, tmp_path / "actor")
    assert vllm.server is not None and engine.params.data.dtype == torch.float32
    for version in range(2):
        responses = replace(vllm, version=version, verify=True).generate(prompts_of(LENGTHS), PLAIN, 3, seed=5)
        assert max_difference(engine, responses) < 0.1
        trained(engine, version + 1)
    assert max_difference(engine, responses) > 0.2
    vllm.server.close()
