"""vLLM computes the log-probabilities of the native engine for every family that both have, with replaced weights."""

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest

from realhf.api.config import GenerationConfig, ModelSpec
from tests.vllm.model import VOCAB, engine_of, prompts_of, vllm_on
from tests.vllm.test_engine import max_difference

pytestmark = [pytest.mark.slow, pytest.mark.vllm]
SIZES = {
    "hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 2,
    "intermediate_size": 64, "vocab_size": VOCAB, "max_position_embeddings": 256, "initializer_range": 0.2,
    "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2,
}  # fmt: skip
ALTERNATING = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
ROUTED = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 8}
FAMILIES: dict[str, dict[str, Any]] = {
    "gemma3_text": {**ALTERNATING, "head_dim": 32, "query_pre_attn_scalar": 24, "rope_local_base_freq": 100.0},
    "glm4": {"head_dim": 32, "attention_bias": True},
    "granite": {"embedding_multiplier": 2.0, "attention_multiplier": 0.3, "residual_multiplier": 0.4},
    "qwen3_moe": {**ROUTED, "num_experts": 4, "head_dim": 32},
    "glm4_moe": {**ROUTED, "n_routed_experts": 4, "head_dim": 32, "first_k_dense_replace": 1, "use_qk_norm": True,
                 "n_group": 2, "topk_group": 1, "routed_scaling_factor": 1.5},
}  # fmt: skip
MORE: dict[str, dict[str, Any]] = {
    "olmo2": {}, "smollm3": {"no_rope_layers": [1, 0]}, "seed_oss": {"head_dim": 32}, "olmo3": ALTERNATING,
    "phi3": {"partial_rotary_factor": 0.5, "original_max_position_embeddings": 256},
    "glm": {"head_dim": 32, "attention_bias": True},
    "cohere2": {**ALTERNATING, "sliding_window": 64, "logit_scale": 0.4},  # vLLM 0.32 differs in longer rows
    "ministral3": {"head_dim": 32, "rope_parameters": {**YARN, "original_max_position_embeddings": 64,
                                                       "llama_4_scaling_beta": 0.5}},  # here too
    "qwen2_moe": {**ROUTED, "num_experts": 4, "shared_expert_intermediate_size": 48},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
}  # fmt: skip
"""``python -m tests.vllm.test_families`` checks these too; a server takes ten seconds to start."""


LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0 + i / 8 for i in range(16)],
            "long_factor": [2.0 + i for i in range(16)]}  # fmt: skip
BY_LENGTH: dict[str, tuple[dict[str, Any], int]] = {
    "longrope, short": ({"rope_parameters": {**LONGROPE, "original_max_position_embeddings": 64}}, 0),
    "longrope, long": ({"rope_parameters": {**LONGROPE, "original_max_position_embeddings": 8,
                                            "attention_factor": 1.3}}, 64),
    "dynamic": ({"rope_scaling": {"rope_type": "dynamic", "factor": 3.0}, "max_position_embeddings": 16}, 64),
}  # fmt: skip
"""Llamas whose rotary embeddings depend on the length of a row, and ``rotary_length``."""


def difference(family: str, folder: Path, own: dict[str, Any] | None = None, rotary_length: int = 0) -> float:
    """Return the largest difference of log-probabilities of sampled responses."""
    (folder / "model").mkdir(parents=True)
    own = {**FAMILIES, **MORE}[family] if own is None else own
    (folder / "model" / "config.json").write_text(json.dumps({"model_type": family, **SIZES, **own}))
    spec = ModelSpec(config=str(folder / "model"), init_from_scratch=True, rotary_length=rotary_length)
    engine = engine_of(spec)
    vllm = vllm_on(engine, folder / "actor")
    try:
        responses = vllm.generate(prompts_of((3, 1, 7, 12)), GenerationConfig(max_new_tokens=14), 2, seed=5)
        return max_difference(engine, responses)
    finally:
        assert vllm.server is not None
        vllm.server.close()


@pytest.mark.parametrize("family", FAMILIES)
def test_log_probabilities_equal_the_native_engine(family: str, tmp_path: Path) -> None:
    assert difference(family, tmp_path) < 1e-4


@pytest.mark.parametrize("kind", BY_LENGTH)
def test_rotary_embeddings_by_length_equal_the_native_engine(kind: str, tmp_path: Path) -> None:
    assert difference("llama", tmp_path, *BY_LENGTH[kind]) < 1e-4


def main() -> None:
    for family in {**FAMILIES, **MORE}:
        with tempfile.TemporaryDirectory() as folder:
            print(f"{family:<12} {difference(family, Path(folder)):.1e}", flush=True)


if __name__ == "__main__":
    main()
