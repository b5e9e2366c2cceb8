"""Which adapters vLLM applies beside the base."""

from dataclasses import replace

import pytest

from realhf.api.model_config import Lora
from realhf.arch.families import FAMILIES
from realhf.arch.hot_adapters import FAMILIES_WITH_ADAPTERS, MAX_RANKS, merge_reason, padded_rank, served_modules
from tests.arch.test_param_specs import LLAMA

ADAPTED = replace(LLAMA, lora=Lora(16, 32.0))


def test_adapters_are_served_beside_the_base() -> None:
    assert merge_reason(ADAPTED, merge_lora=False) is None
    assert merge_reason(replace(ADAPTED, lora=Lora(512)), merge_lora=False) is None


@pytest.mark.parametrize(
    "changed, merge_lora, reason",
    [
        ({}, True, "vllm.merge_lora=True"),
        ({"n_experts": 4}, False, "the model has routed experts"),
        ({"lora": Lora(16, bits=8, group_size=32)}, False, "the base is quantized"),
        ({"family": "gpt2"}, False, "vLLM has no adapters for gpt2 models"),
        ({"lora": Lora(513)}, False, "lora.rank=513 exceeds vLLM's maximum of 512"),
        ({"lora": Lora(0)}, False, "there are no adapters"),
        ({"lora": None}, False, "there are no adapters"),
    ],
)
def test_adapters_are_merged(changed: dict, merge_lora: bool, reason: str) -> None:
    assert merge_reason(replace(ADAPTED, **changed), merge_lora) == reason


def test_every_family_is_decided() -> None:
    merged = {"gpt2", "gpt_neox", "olmo2", "olmo3", "gemma3_text", "phi3", "glm", "glm4", "granite", "cohere2",
              "smollm3", "seed_oss", "ministral", "ministral3", "qwen3_5_text"}  # fmt: skip
    routed = {"mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "glm4_moe", "gpt_oss", "deepseek_v3", "kimi_k2",
              "qwen3_next", "qwen3_5_moe_text"}  # fmt: skip
    assert {*FAMILIES_WITH_ADAPTERS} == FAMILIES.keys() - merged - routed


def test_ranks_are_rounded_up_to_those_of_vllm() -> None:
    assert [padded_rank(rank) for rank in (1, 8, 9, 64, 257, 500, 512)] == [8, 8, 16, 64, 320, 512, 512]
    assert all(padded_rank(rank) == rank for rank in MAX_RANKS)


def test_modules_include_the_fused_ones_of_vllm() -> None:
    targets = replace(ADAPTED, lora=Lora(4, 1.0, ("q_proj", "down_proj")))
    assert served_modules(targets) == ["down_proj", "q_proj", "qkv_proj"]
    assert served_modules(ADAPTED) == sorted(
        ["down_proj", "gate_proj", "gate_up_proj", "k_proj", "o_proj", "q_proj", "qkv_proj", "up_proj", "v_proj"]
    )
