"""Parameter specs, pipeline stages, and Hugging Face configurations of all families."""

import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from realhf.api.model_config import GatedDelta, Latent, ModelConfig
from realhf.api.param_box import box_numel, intersect, shard_box
from realhf.arch.families import FAMILIES
from realhf.arch.hf_config import read_hf_config
from realhf.arch.param_specs import chunk_layers, param_specs, stage_layers
from tests.scaling import examples

LLAMA = ModelConfig("llama", 3, 48, 12, 4, 4, 60, 101, 64)
QWEN2 = replace(LLAMA, family="qwen2", qkv_bias=True, tied_embedding=True)
GPT2 = ModelConfig(
    "gpt2", 3, 48, 12, 12, 4, 192, 101, 64, norm="layer", mlp="ungated", activation="gelu_tanh",
    learned_positions=True, qkv_bias=True, proj_bias=True, mlp_bias=True, tied_embedding=True,
)  # fmt: skip
QWEN3 = replace(LLAMA, family="qwen3", qk_norm="head", sliding_windows=(0, 16, 16))
MISTRAL = replace(LLAMA, family="mistral", sliding_windows=(16, 16, 16), 
                  rotary_scaling=(("rope_type", "linear"), ("factor", 2.0)))  # fmt: skip
GEMMA = replace(LLAMA, family="gemma", norm_offset=1.0, scaled_embedding=True, activation="gelu_tanh")
GEMMA2 = replace(
    GEMMA, family="gemma2", norm_placement="sandwich", sliding_windows=(16, 0, 16), attention_scale=144**-0.5,
    attention_softcap=50.0, logit_softcap=30.0,
)  # fmt: skip
GPT_NEOX = replace(
    GPT2, family="gpt_neox", activation="gelu", learned_positions=False, rotary_dims=2, parallel_residual=True,
    tied_embedding=False,
)  # fmt: skip
MIXTRAL = replace(LLAMA, family="mixtral", n_experts=8, experts_per_token=2, expert_intermediate=60, balance_loss=0.02)
QWEN3_MOE = replace(
    LLAMA, family="qwen3_moe", qk_norm="head", n_experts=5, experts_per_token=3, expert_intermediate=24,
    dense_layers=(1,), renormalise_experts=False, balance_loss=0.001,
)  # fmt: skip
OLMO2 = replace(LLAMA, family="olmo2", norm_placement="post", qk_norm="full")
ALTERNATING = (16, 16, 0)
YARN = (
    ("rope_type", "yarn"), ("original_max_position_embeddings", 16), ("factor", 4.0), ("beta_fast", 32.0),
    ("beta_slow", 1.0), ("truncate", False), ("attention_factor", 1.5),
)  # fmt: skip
TRUNCATED = tuple((key, value or key == "truncate") for key, value in YARN)
SIGMOID = {"expert_scores": "sigmoid", "choice_bias": True, "expert_groups": (3, 2), "expert_scale": 2.5,
           "shared_intermediate": 48}  # fmt: skip
LATENT = replace(
    LLAMA, n_kv_heads=12, head_dim=10, rotary_dims=4, attention_scale=10**-0.5, latent=Latent(8, 6, 14), n_experts=6,
    experts_per_token=2, expert_intermediate=24, dense_layers=(0,), **SIGMOID,
)  # fmt: skip
HYBRID = replace(
    LLAMA, norm_offset=1.0, qk_norm="head", rotary_dims=2, attention_gate=True, delta=GatedDelta(6, 12, 4, 5, 4),
    delta_layers=(0, 2),
)  # fmt: skip
SHARED = {"n_experts": 6, "experts_per_token": 2, "expert_intermediate": 24, "shared_intermediate": 36,
          "shared_gate": True}  # fmt: skip
OTHERS = (
    replace(HYBRID, family="qwen3_next", dense_layers=(0,), qkv_bias=True, proj_bias=True, **SHARED),
    replace(HYBRID, family="qwen3_5_text"),
    replace(HYBRID, family="qwen3_5_moe_text", **{**SHARED, "expert_intermediate": 60}),
    replace(LATENT, family="deepseek_v3"),
    replace(LATENT, family="kimi_k2", latent=Latent(8, 6), rotary_scaling=YARN,
            attention_scale=10**-0.5 * (1 + 0.1 * math.log(4.0)) ** 2),
    replace(OLMO2, family="olmo3", sliding_windows=ALTERNATING, rotary_scaling=TRUNCATED, windowed_rotary_base=1e4),
    replace(GEMMA2, family="gemma3_text", qk_norm="head", sliding_windows=ALTERNATING, windowed_rotary_base=100.0,
            attention_softcap=0.0),
    replace(LLAMA, family="phi3", rotary_dims=2),
    replace(LLAMA, family="glm", rotary_dims=2, qkv_bias=True),
    replace(LLAMA, family="glm4", rotary_dims=2, norm_placement="sandwich"),
    replace(LLAMA, family="granite", embedding_scale=12.0, attention_scale=0.1, residual_scale=0.2, logit_scale=0.125),
    replace(LLAMA, family="cohere2", norm="layer", norm_bias=False, shared_norm=True, parallel_residual=True,
            sliding_windows=ALTERNATING, unrotated_layers=(2,), logit_scale=0.25, tied_embedding=True),
    replace(LLAMA, family="smollm3", unrotated_layers=(1,), tied_embedding=True),
    replace(LLAMA, family="seed_oss", qkv_bias=True, proj_bias=True, mlp_bias=True),
    replace(LLAMA, family="ministral", sliding_windows=ALTERNATING),
    replace(LLAMA, family="ministral3", query_growth=(0.1, 16), rotary_scaling=YARN),
    replace(LLAMA, family="qwen2_moe", qkv_bias=True, n_experts=6, experts_per_token=2, expert_intermediate=24,
            shared_intermediate=36, shared_gate=True, dense_layers=(0,)),
    replace(LLAMA, family="olmoe", qk_norm="full", n_experts=6, experts_per_token=2, expert_intermediate=60),
    replace(LLAMA, family="glm4_moe", qk_norm="head", rotary_dims=2, n_experts=6, experts_per_token=2,
            expert_intermediate=24, dense_layers=(0,), **SIGMOID),
    replace(LLAMA, family="gpt_oss", activation="clamped_swiglu", attention_sinks=True, expert_bias=True, n_experts=6,
            experts_per_token=2, expert_intermediate=60, sliding_windows=ALTERNATING, qkv_bias=True, proj_bias=True,
            rotary_scaling=YARN),
)  # fmt: skip
ALL = (LLAMA, QWEN2, QWEN3, MISTRAL, GEMMA, GEMMA2, GPT2, GPT_NEOX, MIXTRAL, QWEN3_MOE, OLMO2, *OTHERS)
CONFIGS = [c for one in ALL for c in (one, replace(one, head="scalar"))]


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("tp", [1, 2, 3, 4, 6])
def test_tensor_shards_partition_every_parameter(config: ModelConfig, tp: int) -> None:
    for spec in param_specs(config):
        boxes = [shard_box(spec, tp, rank) for rank in range(tp)]
        distinct = sorted(set(boxes))
        assert sum(map(box_numel, distinct)) == spec.numel
        assert not any(intersect(a, b) for i, a in enumerate(distinct) for b in distinct[:i])
        if spec.tp_dim is None:
            assert len(distinct) == 1
        elif spec.tp_units >= tp:
            assert len(distinct) == tp


@pytest.mark.parametrize("config", CONFIGS)
def test_every_parameter_has_a_hugging_face_tensor(config: ModelConfig) -> None:
    names = [spec.name for spec in param_specs(config)]
    assert len(set(names)) == len(names)
    assert set(FAMILIES[config.family].hf_tensors(config)) == set(names)
    assert {config.family for config in CONFIGS} == set(FAMILIES)
    assert ("head.weight" in names) == (config.head == "scalar" or not config.tied_embedding)


@pytest.mark.parametrize("config", CONFIGS)
def test_configurations_round_trip(config: ModelConfig) -> None:
    family = FAMILIES[config.family]
    config = replace(config, bos_token_id=1, eos_token_ids=(2, 3), pad_token_id=0)
    config = replace(config, padding_row=None if config.family in ("gpt2", "gpt_neox") else 0)
    untied = config.head == "scalar"
    back = family.config_from_hf(json.loads(json.dumps(family.config_to_hf(config))), untied)
    assert back == replace(config, tied_embedding=config.tied_embedding and not untied)


@settings(max_examples=examples(50))
@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 5000), st.booleans())
def test_stages_partition_the_layers(n_layers: int, pp: int, vocab: int, tied: bool) -> None:
    config = replace(LLAMA, n_layers=n_layers, vocab=vocab, tied_embedding=tied)
    if pp > n_layers:
        with pytest.raises(ValueError, match="pipeline stages"):
            stage_layers(config, pp)
        return
    stages = stage_layers(config, pp)
    assert [layer for stage in stages for layer in sorted(stage)] == list(range(n_layers + 2))
    assert all(stage & set(range(1, n_layers + 1)) for stage in stages)


@settings(max_examples=examples(50))
@given(st.integers(1, 12), st.integers(2, 4), st.integers(1, 4), st.integers(1, 5000), st.booleans())
def test_stages_have_every_ppth_chunk(n_layers: int, pp: int, vpp: int, vocab: int, tied: bool) -> None:
    config = replace(LLAMA, n_layers=n_layers, vocab=vocab, tied_embedding=tied)
    if pp * vpp > n_layers:
        with pytest.raises(ValueError, match=f"into {pp * vpp} pipeline stages"):
            stage_layers(config, pp, vpp)
        return
    chunks, stages = stage_layers(config, pp * vpp), stage_layers(config, pp, vpp)
    assert [len(stage) for stage in stages] == [sum(map(len, chunks[s::pp])) for s in range(pp)]
    for number, chunk in enumerate(chunk_layers(config, pp * vpp)):
        assert set(chunk) == chunks[number] and chunks[number] <= stages[number % pp]
    assert 0 in stages[0] and n_layers + 1 in stages[-1]


def test_the_stage_of_a_large_embedding_has_fewer_blocks() -> None:
    sizes = [len(stage) for stage in stage_layers(replace(LLAMA, n_layers=8, vocab=620), 3)]
    assert sizes == [3, 4, 3]
    assert [len(s) for s in stage_layers(replace(LLAMA, n_layers=8, vocab=1), 4)] == [3, 2, 2, 3]


def written(folder: Path, **fields: object) -> Path:
    (folder / "config.json").write_text(json.dumps(fields))
    return folder


SIZES = {"hidden_size": 16, "num_attention_heads": 4, "num_hidden_layers": 1, "intermediate_size": 8, "vocab_size": 9}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model_type": "qwen22"}, "unknown model_type 'qwen22', known are llama, .* did you mean qwen2"),
        ({}, "unknown model_type None"),
        ({"model_type": "llama", **SIZES, "hidden_size": None}, "field 'hidden_size' is missing"),
        ({"model_type": "llama", **SIZES, "vocab_size": "9"}, "'vocab_size' must be a positive whole number, got '9'"),
        ({"model_type": "llama", **SIZES, "hidden_size": 18}, "'hidden_size' is 18, not a multiple"),
        ({"model_type": "llama", **SIZES, "num_key_value_heads": 3}, "field 'num_key_value_heads' is 3: 4 query"),
        ({"model_type": "llama", **SIZES, "hidden_act": "prelu"}, "field 'hidden_act' is 'prelu'"),
        ({"model_type": "mistral", **SIZES, "mlp_bias": True}, "field 'mlp_bias' is True"),
        (
            {"model_type": "llama", **SIZES, "rope_scaling": {"type": "su", "factor": 2.0}},
            "field 'type' is 'su', known are",
        ),
        (
            {"model_type": "llama", **SIZES, "rope_scaling": "yarn"},
            "field 'rope_scaling' must be an object, got 'yarn'",
        ),
        ({"model_type": "llama", **SIZES, "rope_parameters": [1]}, "field 'rope_parameters' must be an object, got"),
        ({"model_type": "llama", **SIZES, "rope_scaling": {"type": "longrope"}}, "field 'short_factor' is missing"),
        (
            {"model_type": "phi3", **SIZES, "rope_scaling": {"type": "linear"}},
            "field 'rope_type' is 'linear', which is",
        ),
        ({"model_type": "olmo3", **SIZES, "sliding_window": None}, "field 'sliding_window' is None and there are no"),
        (
            {"model_type": "olmo3", **SIZES, "rope_scaling": {"rope_type": "yarn", "factor": 2.0, "truncate": False}},
            "field 'truncate' is False, only True is supported",
        ),
        (
            {
                "model_type": "olmo3",
                **SIZES,
                "original_max_position_embeddings": 8,
                "rope_scaling": {"rope_type": "yarn", "factor": 2.0},
            },
            "field 'original_max_position_embeddings' is 8, which is not supp",
        ),
        (
            {"model_type": "glm4", **SIZES, "partial_rotary_factor": 1e-6},
            "field 'partial_rotary_factor' or 'rotary_pct' is 1e-06: no di",
        ),
        ({"model_type": "deepseek_v3", **SIZES, "num_key_value_heads": 2}, "field 'num_key_value_heads' is 2, latent"),
        (
            {"model_type": "deepseek_v3", **SIZES, "head_dim": 12},
            "field 'head_dim' is 12, here it is the same as qk_rope",
        ),
        ({"model_type": "deepseek_v3", **SIZES, "head_dim": [8]}, "field 'head_dim' must be a positive whole number"),
        (
            {"model_type": "deepseek_v3", **SIZES, "n_group": 3},
            "fields 'n_routed_experts', 'n_group' and 'topk_group' a",
        ),
        (
            {"model_type": "deepseek_v3", **SIZES, "n_group": 256},
            "field 'n_group' is 256: groups are ranked by two exp",
        ),
        ({"model_type": "llama", **SIZES, "rope_scaling": {"rope_type": "llama3"}}, "'factor' is missing"),
        ({"model_type": "mistral", **SIZES, "sliding_window": 0}, "'sliding_window' must be a positive whole number"),
        ({"model_type": "qwen3", **SIZES, "use_sliding_window": True, "layer_types": ["a"]}, "'layer_types' must name"),
        ({"model_type": "gemma2", **SIZES, "layer_types": ["full_attention"] * 2}, "for 1 layers, got"),
        ({"model_type": "gemma2", **SIZES, "final_logit_softcapping": -1}, "'final_logit_softcapping' must be a posi"),
        ({"model_type": "gemma", **SIZES, "use_bidirectional_attention": True}, "only False is supported"),
        ({"model_type": "gpt_neox", **SIZES, "attention_bias": 0}, "'attention_bias' must be true or false, got 0"),
        ({"model_type": "gpt_neox", **SIZES, "rotary_pct": 0.8}, "rotary dimensions must be even and at most 4, got 3"),
        ({"model_type": "mixtral", **SIZES, "router_jitter_noise": 0.1}, "field 'router_jitter_noise' is 0.1"),
        (
            {"model_type": "mixtral", **SIZES, "num_key_value_heads": 4, "num_experts_per_tok": 9},
            "field 'num_experts_per_tok' is 9, the model has 8 experts",
        ),
        ({"model_type": "qwen3_moe", **SIZES, "router_aux_loss_coef": -1}, "must be a number of 0 or more, got -1"),
    ],
)
def test_invalid_configurations_are_rejected(tmp_path: Path, fields: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("'", ".")):
        read_hf_config(written(tmp_path, **fields), False)


def test_a_null_head_size_of_seed_oss_is_that_of_llama(tmp_path: Path) -> None:
    fields = {"model_type": "seed_oss", **SIZES, "num_key_value_heads": 4}
    assert read_hf_config(written(tmp_path, **fields, head_dim=None), False).head_dim == 4
    assert read_hf_config(written(tmp_path, **fields), False).head_dim == 128


def test_missing_and_malformed_files_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no model configuration at .*config.json"):
        read_hf_config(tmp_path, False)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="is not valid JSON"):
        read_hf_config(tmp_path / "config.json", False)


def test_old_and_new_rotary_scaling_fields_are_equivalent(tmp_path: Path) -> None:
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1, "high_freq_factor": 4}
    scaling["original_max_position_embeddings"] = 64
    old = written(tmp_path, model_type="llama", **SIZES, rope_theta=5e5, rope_scaling=scaling)
    first = read_hf_config(old, False)
    new = written(tmp_path, model_type="llama", **SIZES, rope_parameters={"rope_theta": 5e5, **scaling})
    assert read_hf_config(new, False) == first
    assert first.rotary_base == 5e5
    assert dict(first.rotary_scaling)["factor"] == 8.0


def test_reading_a_configuration_does_not_import_torch() -> None:
    code = "import sys, realhf.arch.hf_config; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
