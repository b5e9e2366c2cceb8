"""Configurations of released models with reduced sizes: outputs equal those of transformers."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from realhf.arch.families import FAMILIES
from realhf.arch.hf_config import read_hf_config
from tests.models.tiny_models import load_model

SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 67}
SMALL |= {"initializer_range": 0.2}
WIDE = {**SMALL, "intermediate_size": 48, "num_key_value_heads": 2}
ROUTED = {"num_experts_per_tok": 4, "moe_intermediate_size": 24, "norm_topk_prob": True}
OLD_MISTRAL = {"bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu", "max_position_embeddings": 32768,
               "rms_norm_eps": 1e-05, "tie_word_embeddings": False, "use_cache": True}  # fmt: skip
QWEN = {"attention_dropout": 0.0, "bos_token_id": 151643, "eos_token_id": 151645, "hidden_act": "silu",
        "max_position_embeddings": 40960, "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 1000000,
        "sliding_window": None, "tie_word_embeddings": False, "use_sliding_window": False}  # fmt: skip
GEMMA = {"attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 2, "eos_token_id": 1, "pad_token_id": 0,
         "head_dim": 16, "max_position_embeddings": 8192, "rms_norm_eps": 1e-06, "rope_theta": 10000.0}  # fmt: skip
NEOX = {"hidden_act": "gelu", "intermediate_size": 128, "layer_norm_eps": 1e-05, "max_position_embeddings": 2048,
        "rotary_emb_base": 10000, "rotary_pct": 0.25, "use_parallel_residual": True}  # fmt: skip
LINEAR = {"linear_conv_kernel_dim": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8, "initializer_range": 0.1}
QWEN35 = {
    "attention_bias": False, "attention_dropout": 0.0, "attn_output_gate": True, "eos_token_id": 7,
    "full_attention_interval": 4, "head_dim": 16, "hidden_act": "silu",
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
    "mamba_ssm_dtype": "float32", "max_position_embeddings": 262144, "mtp_num_hidden_layers": 1,
    "mtp_use_dedicated_embeddings": False, "num_hidden_layers": 4, "rms_norm_eps": 1e-06, "tie_word_embeddings": False,
    "use_cache": True, "vocab_size": 67,
    "rope_parameters": {"mrope_interleaved": True, "mrope_section": [11, 11, 10], "partial_rotary_factor": 0.25,
                        "rope_theta": 10000000, "rope_type": "default"},
}  # fmt: skip
RELEASED: dict[str, dict[str, Any]] = {
    "llama-3.1-8b": {
        **WIDE, "model_type": "llama", "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 5,
        "eos_token_id": [6, 7, 8], "hidden_act": "silu", "max_position_embeddings": 131072, "mlp_bias": False,
        "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_theta": 500000.0, "tie_word_embeddings": False,
        "rope_scaling": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                         "original_max_position_embeddings": 8192, "rope_type": "llama3"},
    },
    "gpt2-medium": {
        "model_type": "gpt2", "activation_function": "gelu_new", "attn_pdrop": 0.1, "bos_token_id": 5,
        "embd_pdrop": 0.1, "eos_token_id": 5, "initializer_range": 0.2, "layer_norm_epsilon": 1e-05, "n_ctx": 1024,
        "n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 1024, "n_special": 0, "predict_special_tokens": True,
        "resid_pdrop": 0.1, "summary_activation": None, "summary_first_dropout": 0.1,
        "summary_proj_to_labels": True, "summary_type": "cls_index", "summary_use_proj": True,
        "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}}, "vocab_size": 67,
    },
    "mistral-7b-v0.1": {**WIDE, **OLD_MISTRAL, "model_type": "mistral", "rope_theta": 10000.0, "sliding_window": 4096},
    "mistral-7b-v0.3": {**WIDE, **OLD_MISTRAL, "model_type": "mistral", "rope_theta": 1e6, "sliding_window": None},
    "mistral-nemo": {**WIDE, **OLD_MISTRAL, "model_type": "mistral", "rope_theta": 1e6, "head_dim": 16},
    "mixtral-8x7b-v0.1": {
        **WIDE, **OLD_MISTRAL, "model_type": "mixtral", "num_experts_per_tok": 2, "num_local_experts": 8,
        "output_router_logits": False, "rope_theta": 1e6, "router_aux_loss_coef": 0.02, "sliding_window": None,
    },
    "qwen2.5-7b": {**WIDE, **QWEN, "model_type": "qwen2", "max_window_layers": 28, "sliding_window": 131072},
    "qwen3-8b": {**WIDE, **QWEN, "model_type": "qwen3", "attention_bias": False, "head_dim": 16,
                 "max_window_layers": 36},
    "qwen3-30b-a3b": {
        **WIDE, **QWEN, "model_type": "qwen3_moe", "attention_bias": False, "decoder_sparse_step": 1, "head_dim": 16,
        "max_window_layers": 48, "mlp_only_layers": [], "moe_intermediate_size": 24, "norm_topk_prob": True,
        "num_experts": 8, "num_experts_per_tok": 4, "output_router_logits": False, "router_aux_loss_coef": 0.001,
    },
    "gemma-2b": {**WIDE, **GEMMA, "model_type": "gemma", "num_key_value_heads": 1, "hidden_act": "gelu"},
    "gemma-7b": {**WIDE, **GEMMA, "model_type": "gemma", "hidden_act": "gelu_pytorch_tanh",
                 "hidden_activation": "gelu_pytorch_tanh"},
    "gemma-2-27b": {
        **WIDE, **GEMMA, "model_type": "gemma2", "attn_logit_softcapping": 50.0, "cache_implementation": "hybrid",
        "final_logit_softcapping": 30.0, "hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 144, "sliding_window": 4096,
    },
    "pythia-70m": {**SMALL, **NEOX, "model_type": "gpt_neox", "bos_token_id": 0, "eos_token_id": 0,
                   "tie_word_embeddings": False},
    "gpt-neox-20b": {**SMALL, **NEOX, "model_type": "gpt_neox", "hidden_act": "gelu_fast", "eos_token_id": 0},
    "redpajama-incite": {**SMALL, **NEOX, "model_type": "gpt_neox", "rotary_pct": 1.0, "use_parallel_residual": False},
    "olmo-2-1b": {
        **WIDE, "model_type": "olmo2", "attention_bias": False, "attention_dropout": 0.0, "eos_token_id": 100257,
        "hidden_act": "silu", "max_position_embeddings": 4096, "num_key_value_heads": 4, "pad_token_id": 1,
        "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 500000, "tie_word_embeddings": False,
    },
    "gemma-3-1b": {
        **WIDE, "model_type": "gemma3_text", "attention_bias": False, "attention_dropout": 0.0,
        "attn_logit_softcapping": None, "bos_token_id": 2, "cache_implementation": "hybrid", "eos_token_id": [1, 106],
        "final_logit_softcapping": None, "head_dim": 16, "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 32768, "num_key_value_heads": 1, "pad_token_id": 0, "query_pre_attn_scalar": 256,
        "rms_norm_eps": 1e-06, "rope_local_base_freq": 10000, "rope_scaling": None, "rope_theta": 1000000,
        "sliding_window": 512, "sliding_window_pattern": 6, "num_hidden_layers": 7, "use_cache": True,
    },
    "phi-4": {
        **WIDE, "model_type": "phi3", "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 3,
        "embd_pdrop": 0.0, "eos_token_id": 5, "hidden_act": "silu", "max_position_embeddings": 16384,
        "original_max_position_embeddings": 16384, "pad_token_id": 6, "resid_pdrop": 0.0, "rms_norm_eps": 1e-05,
        "rope_scaling": None, "rope_theta": 250000, "sliding_window": None, "tie_word_embeddings": False,
    },
    "phi-4-mini": {
        **WIDE, "model_type": "phi3", "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 3,
        "embd_pdrop": 0.0, "eos_token_id": 5, "full_attn_mod": 1, "hidden_act": "silu", "interpolate_factor": 1,
        "lm_head_bias": False, "max_position_embeddings": 131072, "mlp_bias": False, "num_key_value_heads": 2,
        "original_max_position_embeddings": 4096, "pad_token_id": 6, "partial_rotary_factor": 0.75,
        "resid_pdrop": 0.0, "rms_norm_eps": 1e-05, "rope_theta": 10000.0, "sliding_window": 262144,
        "rope_scaling": {"long_factor": [1.0, 4.0, 32.0], "short_factor": [1.0, 1.1, 1.2], "type": "longrope"},
        "tie_word_embeddings": True,
    },
    "glm-4-0414": {
        **WIDE, "model_type": "glm4", "attention_bias": False, "attention_dropout": 0.0, "eos_token_id": [5, 6],
        "head_dim": 16, "hidden_act": "silu", "max_position_embeddings": 32768, "num_key_value_heads": 2,
        "pad_token_id": 5, "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-05, "rope_theta": 10000.0,
        "tie_word_embeddings": False,
    },
    "glm-4-9b-chat": {
        **WIDE, "model_type": "glm", "attention_bias": True, "attention_dropout": 0.0, "eos_token_id": [5, 6],
        "head_dim": 16, "hidden_act": "silu", "max_position_embeddings": 131072, "num_key_value_heads": 2,
        "pad_token_id": 5, "partial_rotary_factor": 0.5, "rms_norm_eps": 1.5625e-07, "rope_theta": 10000.0,
        "tie_word_embeddings": False,
    },
    "granite-3.3-2b": {
        **WIDE, "model_type": "granite", "attention_bias": False, "attention_dropout": 0.0,
        "attention_multiplier": 0.015625, "bos_token_id": 0, "embedding_multiplier": 12.0, "eos_token_id": 0,
        "hidden_act": "silu", "logits_scaling": 8.0, "max_position_embeddings": 131072, "mlp_bias": False,
        "num_key_value_heads": 2, "pad_token_id": 0, "residual_multiplier": 0.22, "rms_norm_eps": 1e-05,
        "rope_scaling": None, "rope_theta": 10000000.0, "tie_word_embeddings": True,
    },
    "command-r7b": {
        **WIDE, "model_type": "cohere2", "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 5,
        "cache_implementation": "hybrid", "eos_token_id": 7, "head_dim": 8, "hidden_act": "silu",
        "layer_norm_eps": 1e-05, "logit_scale": 0.25, "max_position_embeddings": 8192, "num_hidden_layers": 5,
        "order_of_interleaved_layers": "local_attn_first", "pad_token_id": 0, "position_embedding_type": "rope_gptj",
        "rope_scaling": None, "rope_theta": 50000, "rotary_pct": 1.0, "sliding_window": 4096,
        "sliding_window_pattern": 4, "use_embedding_sharing": True, "use_gated_activation": True,
        "use_parallel_block": True, "use_parallel_embedding": True,
    },
    "smollm3-3b": {
        **WIDE, "model_type": "smollm3", "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": None,
        "eos_token_id": 12, "hidden_act": "silu", "layer_types": ["full_attention"] * 5,
        "max_position_embeddings": 65536, "max_window_layers": 28, "mlp_bias": False,
        "no_rope_layer_interval": 4, "no_rope_layers": [1, 1, 1, 0, 1], "num_hidden_layers": 5, "pad_token_id": 4,
        "pretraining_tp": 2, "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 5000000.0,
        "sliding_window": None, "use_sliding_window": False,
    },
    "seed-oss-36b": {
        **WIDE, "model_type": "seed_oss", "attention_bias": True, "attention_dropout": 0.1, "attention_out_bias": False,
        "bos_token_id": 0, "eos_token_id": 2, "head_dim": 16, "hidden_act": "silu", "max_position_embeddings": 524288,
        "mlp_bias": False, "num_key_value_heads": 2, "pad_token_id": 1, "residual_dropout": 0.1, "rms_norm_eps": 1e-06,
        "rope_scaling": {"rope_type": "default"}, "rope_theta": 10000000.0, "tie_word_embeddings": False,
    },
    "olmo-3-7b": {
        **WIDE, "model_type": "olmo3", "attention_bias": False, "attention_dropout": 0.0, "eos_token_id": 7,
        "hidden_act": "silu", "layer_types": ["sliding_attention"] * 3 + ["full_attention"], "num_hidden_layers": 4,
        "max_position_embeddings": 65536, "num_key_value_heads": 4, "pad_token_id": 1, "rms_norm_eps": 1e-06,
        "rope_scaling": {"attention_factor": 1.2079441541679836, "beta_fast": 32.0, "beta_slow": 1.0, "factor": 8.0,
                         "original_max_position_embeddings": 8192, "rope_type": "yarn"},
        "rope_theta": 500000, "sliding_window": 4096, "tie_word_embeddings": False,
    },
    "ministral-8b": {**WIDE, **OLD_MISTRAL, "model_type": "ministral", "rope_theta": 1e8, "head_dim": 16,
                     "sliding_window": 32768,
                     "layer_types": ["full_attention", "sliding_attention"]},
    "ministral-3-3b": {
        **WIDE, "model_type": "ministral3", "attention_dropout": 0.0, "head_dim": 16, "hidden_act": "silu",
        "max_position_embeddings": 262144, "rms_norm_eps": 1e-05, "sliding_window": None, "tie_word_embeddings": True,
        "rope_parameters": {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 16.0, "llama_4_scaling_beta": 0.1,
                            "mscale": 1.0, "mscale_all_dim": 1.0, "original_max_position_embeddings": 16384,
                            "rope_theta": 1000000.0, "rope_type": "yarn", "type": "yarn"},
    },
    "deepseek-v3": {
        **SMALL, **ROUTED, "model_type": "deepseek_v3", "attention_bias": False, "attention_dropout": 0.0,
        "aux_loss_alpha": 0.001, "bos_token_id": 0, "eos_token_id": 1, "ep_size": 1, "first_k_dense_replace": 1,
        "hidden_act": "silu", "intermediate_size": 48, "kv_lora_rank": 16, "max_position_embeddings": 163840,
        "moe_layer_freq": 1, "n_group": 4, "n_routed_experts": 8, "n_shared_experts": 1, "num_key_value_heads": 4,
        "num_nextn_predict_layers": 1, "pretraining_tp": 1, "q_lora_rank": 24, "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8, "rms_norm_eps": 1e-06, "rope_theta": 10000,
        "rope_scaling": {"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
                         "original_max_position_embeddings": 4096, "type": "yarn"},
        "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "seq_aux": True, "tie_word_embeddings": False,
        "topk_group": 2, "topk_method": "noaux_tc", "v_head_dim": 8,
    },
    "glm-4.5-air": {
        **WIDE, **ROUTED, "model_type": "glm4_moe", "attention_bias": True, "attention_dropout": 0.0,
        "eos_token_id": [5, 6], "first_k_dense_replace": 1, "head_dim": 16, "hidden_act": "silu",
        "max_position_embeddings": 131072, "n_group": 1, "n_routed_experts": 8, "n_shared_experts": 1,
        "num_nextn_predict_layers": 1, "pad_token_id": 5, "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-05,
        "rope_scaling": None, "rope_theta": 1000000, "routed_scaling_factor": 1.0, "tie_word_embeddings": False,
        "topk_group": 1, "use_qk_norm": False,
    },
    "gpt-oss-20b": {
        **WIDE, "model_type": "gpt_oss", "attention_bias": True, "attention_dropout": 0.0, "eos_token_id": 2,
        "experts_per_token": 2, "head_dim": 16, "hidden_act": "silu", "initial_context_length": 4096,
        "layer_types": ["sliding_attention", "full_attention"], "max_position_embeddings": 131072,
        "num_experts_per_tok": 2, "num_local_experts": 8, "output_router_logits": False, "pad_token_id": 6,
        "rms_norm_eps": 1e-05, "rope_theta": 150000, "router_aux_loss_coef": 0.9, "sliding_window": 128,
        "rope_scaling": {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "rope_type": "yarn", "truncate": False,
                         "original_max_position_embeddings": 4096},
        "swiglu_limit": 7.0, "tie_word_embeddings": False,
    },
    "qwen1.5-moe-a2.7b": {
        **WIDE, **ROUTED, **QWEN, "model_type": "qwen2_moe", "decoder_sparse_step": 1, "max_window_layers": 21,
        "norm_topk_prob": False, "num_experts": 8, "output_router_logits": False, "router_aux_loss_coef": 0.001,
        "shared_expert_intermediate_size": 40,
    },
    "olmoe-1b-7b": {
        **WIDE, "model_type": "olmoe", "attention_bias": False, "attention_dropout": 0.0, "clip_qkv": None,
        "eos_token_id": 7, "hidden_act": "silu", "max_position_embeddings": 4096, "norm_topk_prob": False,
        "num_experts": 8, "num_experts_per_tok": 4, "num_key_value_heads": 4, "output_router_logits": False,
        "pad_token_id": 1, "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 10000.0,
        "router_aux_loss_coef": 0.01, "tie_word_embeddings": False,
    },
    "qwen3-next-80b-a3b": {
        **WIDE, **ROUTED, **LINEAR, "model_type": "qwen3_next", "attention_dropout": 0.0, "bos_token_id": 5,
        "decoder_sparse_step": 1, "eos_token_id": 7, "full_attention_interval": 4, "head_dim": 16, "hidden_act": "silu",
        "linear_num_key_heads": 2, "linear_num_value_heads": 4, "max_position_embeddings": 262144,
        "mlp_only_layers": [], "num_experts": 8, "num_hidden_layers": 5, "output_router_logits": False,
        "partial_rotary_factor": 0.25, "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 10000000,
        "router_aux_loss_coef": 0.001, "shared_expert_intermediate_size": 24, "tie_word_embeddings": False,
        "use_cache": True, "use_sliding_window": False,
    },
    "qwen3.5-27b": {
        **WIDE, **LINEAR, **QWEN35, "model_type": "qwen3_5_text", "linear_num_key_heads": 2,
        "linear_num_value_heads": 6, "mlp_only_layers": [],
    },
    "qwen3.5-35b-a3b": {
        **SMALL, **LINEAR, **QWEN35, "model_type": "qwen3_5_moe_text", "linear_num_key_heads": 2,
        "linear_num_value_heads": 4, "moe_intermediate_size": 24, "num_experts": 8, "num_experts_per_tok": 4,
        "num_key_value_heads": 2, "output_router_logits": False, "router_aux_loss_coef": 0.001,
        "shared_expert_intermediate_size": 24,
    },
    "deepseek-coder": {**WIDE, **OLD_MISTRAL, "model_type": "llama", "rope_theta": 100000,
                       "rope_scaling": {"type": "linear", "factor": 4.0}},
}  # fmt: skip
TOKENS = torch.arange(3, 30)


@pytest.mark.parametrize("name", RELEASED)
def test_a_released_configuration_gives_the_same_logits(name: str, tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(RELEASED[name]))
    torch.manual_seed(0)
    reference = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path)).eval()
    reference.save_pretrained(tmp_path)
    config.write_text(json.dumps(RELEASED[name]))  # as released, not as written by transformers
    with torch.no_grad():
        model = load_model(tmp_path)
        logits = model.logits(model.hidden(TOKENS, [len(TOKENS)]))
        assert torch.allclose(logits, reference(TOKENS[None]).logits[0], atol=1e-4)


def test_windows_and_coefficients_are_read(tmp_path: Path) -> None:
    def read(name: str) -> Any:
        (tmp_path / "config.json").write_text(json.dumps(RELEASED[name]))
        return read_hf_config(tmp_path, False)

    assert read("mistral-7b-v0.1").sliding_windows == (4096, 4096) and not read("mistral-7b-v0.3").sliding_windows
    assert read("gemma-2-27b").sliding_windows == (4096, 0) and not read("qwen2.5-7b").sliding_windows
    assert read("mixtral-8x7b-v0.1").balance_loss == 0.02 and read("qwen3-30b-a3b").balance_loss == 0.001
    assert read("gemma-2b").tied_embedding and not read("pythia-70m").tied_embedding


def test_buffers_of_old_pythia_folders_are_ignored(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(RELEASED["pythia-70m"]))
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path)).save_pretrained(tmp_path)
    before = load_model(tmp_path).params.data
    tensors = load_file(tmp_path / "model.safetensors")
    for layer in range(2):
        prefix = f"gpt_neox.layers.{layer}.attention."
        tensors |= {prefix + "bias": torch.ones(1, 1, 4, 4), prefix + "masked_bias": torch.tensor(-1e9)}
        tensors[prefix + "rotary_emb.inv_freq"] = torch.ones(1)
    save_file(tensors, tmp_path / "model.safetensors")
    assert torch.equal(load_model(tmp_path).params.data, before)


CLAIMS = {
    "is_causal": (False, None),
    "quantization_config": ({"quant_method": "bitsandbytes"}, {"quant_method": "awq", "bits": 3}),
    "per_layer_config": ({"0": {"intermediate_size": 64}},),
    "auto_map": ({"AutoModelForCausalLM": "modeling.Other"},),
    "attention_chunk_size": (8,),
    "residual_multiplier": (0.2,),
    "a_later_invention": (True, 0, "x"),
}


@pytest.mark.parametrize("name", RELEASED)
@pytest.mark.parametrize("field", CLAIMS)
def test_fields_that_could_change_the_mathematics_are_refused_by_name(name: str, field: str, tmp_path: Path) -> None:
    if field in RELEASED[name] or field in FAMILIES[RELEASED[name]["model_type"]].unused:
        pytest.skip("the family has this field")
    for value in CLAIMS[field]:
        (tmp_path / "config.json").write_text(json.dumps({**RELEASED[name], field: value}))
        with pytest.raises(ValueError, match=f"field '{field}' is "):
            read_hf_config(tmp_path, False)


@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "kimi_k2"])  # not in transformers
def test_the_fields_that_transformers_saves_are_accepted(family: str, tmp_path: Path) -> None:
    own = {"head_dim": 128} if family == "glm4_moe" else {}  # without it the default has 21 rotary dimensions
    AutoConfig.for_model(family, **own).save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**AutoConfig.for_model(family, **own).to_dict(), **saved}))
    full = read_hf_config(tmp_path, False)
    required = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size", "n_embd",
                "n_layer", "n_head", "model_type", *own)  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps({key: saved[key] for key in required if key in saved}))
    bare = read_hf_config(tmp_path, False)  # with our defaults for all other fields
    tokens = {"bos_token_id": None, "eos_token_ids": (), "pad_token_id": None, "padding_row": None}
    assert replace(bare, **tokens) == replace(full, **tokens)
