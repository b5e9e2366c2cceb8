"""FlashAttention behind the same function as torch's kernel: where it is chosen, and that results are equal."""

from pathlib import Path

import pytest
import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)

from realhf.api.config import GenerationConfig
from realhf.ops import varlen
from realhf.ops.attention import ScoreParams, rotary_attention, rotary_attention_reference
from tests.gpu_emulated.fake_flash import installed
from tests.gpu_emulated.fake_runtime import fake_cuda
from tests.gpu_emulated.test_engine import LENGTHS, PROMPTS, TOLERANCE, distance, logprobs, on_device
from tests.models.engine.tiny_engine import counted, engine_on, nll, prompts_of, rows_of
from tests.models.tiny_models import CAPS, SIZES, WINDOW

TORCH, FLASH_2, FLASH_3 = "torch.nn.attention.varlen", "flash_attn", "flash_attn_interface"


@pytest.mark.parametrize(
    "modules, capability, rules, expected",
    [
        ((FLASH_2, FLASH_3), (9, 0), [(0.0, 0)], FLASH_3),
        ((FLASH_2, FLASH_3), (8, 6), [(0.0, 0)], FLASH_2),
        ((FLASH_2, FLASH_3), (10, 0), [(0.0, 0)], FLASH_2),
        ((FLASH_3,), (8, 0), [(0.0, 0)], TORCH),
        ((), (9, 0), [(0.0, 0), (0.0, 64)], TORCH),
        ((), (9, 0), [(0.0, 0), (50.0, 0)], None),
        ((FLASH_2,), (8, 0), [(50.0, 0), (50.0, 64)], FLASH_2),
        ((FLASH_2,), (7, 5), [(0.0, 0)], None),
    ],
)
def test_the_kernel_is_chosen_by_what_is_installed(
    modules: tuple[str, ...], capability: tuple[int, int], rules: list[varlen.Rule], expected: str | None
) -> None:
    with installed(*modules), fake_cuda(capability=capability):
        for decoding in (False, True):
            kernel = varlen.kernel_for(torch.device("cuda:0"), torch.bfloat16, 64, rules, decoding)
            assert (kernel and kernel.module) == expected


def test_a_package_for_another_torch_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its compiled library fails to load, which is an ImportError."""
    monkeypatch.setitem(__import__("sys").modules, "flash_attn", None)
    with installed():
        assert [kernel.module for kernel in varlen.kernels()] == [TORCH]


@pytest.mark.parametrize("module", [FLASH_2, FLASH_3])
@pytest.mark.parametrize("scoring", [ScoreParams(), ScoreParams(0.2, 3, 0.0), ScoreParams(0.3, 0, 5.0)])
def test_results_and_gradients_equal_the_reference(module: str, scoring: ScoreParams) -> None:
    torch.manual_seed(0)
    lengths, prefixes = (5, 3, 4, 6), (-1, 0, 0, -1)
    host = torch.randn(sum(lengths), 8, 16)
    expected_in = host.bfloat16().float().requires_grad_()
    expected = rotary_attention_reference(expected_in, 4, 2, lengths, scoring, prefixes)
    weights = torch.randn(expected.shape)
    (expected * weights).sum().backward()
    with installed(module) as calls, fake_cuda():
        qkv = host.bfloat16().to("cuda:0").requires_grad_()
        out = rotary_attention(qkv, 4, 2, lengths, scoring, prefixes)
        (out.float() * weights.to("cuda:0")).sum().backward()
        assert calls[module] == 1 and qkv.grad is not None and expected_in.grad is not None
        torch.testing.assert_close(out.detach().cpu().float(), expected.detach(), atol=0.03, rtol=0.02)
        assert distance(qkv.grad, expected_in.grad) < 0.02


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """By family: a folder with a tiny random model, whose head dimension the kernels accept."""
    sizes = {**SIZES, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    models = {
        "llama": LlamaForCausalLM(LlamaConfig(**sizes)),
        "gemma2": Gemma2ForCausalLM(Gemma2Config(**sizes, sliding_window=WINDOW, **CAPS)),
        "mistral": MistralForCausalLM(MistralConfig(**sizes, sliding_window=WINDOW)),
    }
    found = {}
    for family, model in models.items():
        found[family] = tmp_path_factory.mktemp(family)
        model.save_pretrained(found[family])
    return found


@pytest.mark.parametrize("module", [FLASH_2, FLASH_3])
@pytest.mark.parametrize("family", ["llama", "gemma2", "mistral"])
def test_training_and_generation_equal_the_cpu(module: str, family: str, folders: dict[str, Path]) -> None:
    """With soft caps and windows; decoding runs in graphs, so the kernel for caches may not wait for the host."""
    rows, cpu = rows_of(LENGTHS, per_prompt=2), engine_on(folders[family])
    expected, norm = logprobs(cpu, rows), cpu.train(rows, nll, counted(rows))["grad_norm"][0]
    config, other = GenerationConfig(max_new_tokens=10, max_num_seqs=4), engine_on(folders[family], trained=False)
    with installed(module) as calls, fake_cuda():
        gpu, there = on_device(folders[family], True), rows.to("cuda:0")
        assert distance(logprobs(gpu, there), expected) < TOLERANCE[True]
        assert gpu.train(there, nll, counted(rows))["grad_norm"][0] == pytest.approx(norm, rel=5 * TOLERANCE[True])
        made = on_device(folders[family], True, trained=False).generate(prompts_of(PROMPTS).to("cuda:0"), config, 2, 11)
        made = made.to("cpu")
        assert calls[module] and calls["with_kvcache"]
    sampled = made["prompt_mask"] == 0
    assert distance(made["logprobs"][sampled], logprobs(other, made)[sampled]) < TOLERANCE[True]


def test_the_backward_pass_is_deterministic_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    with installed(FLASH_2):
        kernel = varlen.kernels()[0]
        assert kernel.module == FLASH_2
        for enabled in (False, True):
            monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda enabled=enabled: enabled)
            assert kernel._flash_options(1.0, (0.0, 0))["deterministic"] is enabled
