"""Random configurations of every family, and random edits: fields of transformers, their old names, invalid values."""

import random
from typing import Any

SIZES = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 48, "vocab_size": 67}
GPT2 = {"n_embd": 32, "n_head": 4, "n_layer": 2, "vocab_size": 67, "n_positions": 32}
TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "initializer_range": 0.2}
EXPERTS = {"num_experts_per_tok": 2}
HYBRID = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 6,
          "head_dim": 16, "initializer_range": 0.1}  # fmt: skip
OWN: dict[str, dict[str, Any]] = {
    "llama": {}, "qwen2": {}, "mistral": {}, "olmo2": {}, "gpt_neox": {}, "gpt2": {},
    "seed_oss": {}, "granite": {"attention_multiplier": 0.3, "residual_multiplier": 0.4, "logits_scaling": 3.0,
                                "embedding_multiplier": 2.0},
    "phi3": {"partial_rotary_factor": 0.5}, "glm": {"head_dim": 16}, "glm4": {"head_dim": 16},
    "cohere2": {"sliding_window": 5, "sliding_window_pattern": 2},
    "smollm3": {"no_rope_layer_interval": 2}, "ministral": {"head_dim": 16, "sliding_window": 5},
    "ministral3": {"head_dim": 16},
    "olmo3": {"sliding_window": 5},
    "gemma3_text": {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 5, "sliding_window_pattern": 2},
    "qwen3": {"head_dim": 16},
    "gemma": {"head_dim": 16},
    "gemma2": {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 5},
    "qwen2_moe": {**EXPERTS, "num_experts": 4, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 24},
    "olmoe": {**EXPERTS, "num_experts": 4},
    "glm4_moe": {**EXPERTS, "n_routed_experts": 4, "moe_intermediate_size": 16},
    "deepseek_v3": {**EXPERTS, "n_routed_experts": 8, "moe_intermediate_size": 16, "kv_lora_rank": 12,
                    "q_lora_rank": 20, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 12, "n_group": 4,
                    "topk_group": 2, "first_k_dense_replace": 1},
    "gpt_oss": {**EXPERTS, "num_local_experts": 4, "head_dim": 16, "sliding_window": 5},
    "mixtral": {**EXPERTS, "num_local_experts": 4},
    "qwen3_moe": {**EXPERTS, "num_experts": 4, "moe_intermediate_size": 16},
    "qwen3_next": {**EXPERTS, **HYBRID, "num_experts": 4, "moe_intermediate_size": 16, "full_attention_interval": 2,
                   "shared_expert_intermediate_size": 24},
    "qwen3_5_text": {**HYBRID, "layer_types": ["linear_attention", "full_attention"]},
    "qwen3_5_moe_text": {**EXPERTS, **HYBRID, "num_experts": 4, "moe_intermediate_size": 16,
                         "layer_types": ["full_attention", "linear_attention"], "shared_expert_intermediate_size": 24},
}  # fmt: skip
ACTIVATIONS = (
    "silu", "swish", "gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh", "gelu_python_tanh", "gelu_accurate",
    "quick_gelu", "relu", "relu2", "relu6", "leaky_relu", "mish", "hardswish", "sigmoid", "tanh", "gelu_10", "linear",
    "laplace", "gelu_python", "prelu", "unknown",
)  # fmt: skip
WITHOUT_HEAD_DIM = ("gpt_neox", "cohere2", "phi3", "granite", "olmoe", "deepseek_v3")
FLAGS = (True, True, False, None, 1)
OF_FEW_FAMILIES: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("embedding_multiplier", "attention_multiplier", "residual_multiplier"), (0.5, 2, 1, 0, -1.0)),
    **dict.fromkeys(("logits_scaling", "logit_scale"), (0.25, 2.0, 0)),
    "attention_out_bias": FLAGS,
    "shared_expert_intermediate_size": (16, 40),
    "n_routed_experts": (2, 6),
    "n_shared_experts": (1, 2, 0),
    "n_group": (1, 2, 3),
    "topk_group": (1, 2),
    "routed_scaling_factor": (1.0, 2.5),
    "first_k_dense_replace": (0, 1, 2, 3),
    "use_qk_norm": FLAGS,
    "clip_qkv": (None, 1.0),
    "kv_lora_rank": (8, 16),
    "q_lora_rank": (None, 12),
    "qk_rope_head_dim": (4, 16),
    "qk_nope_head_dim": (4, 16),
    "v_head_dim": (8, 16, 24),
    "rope_interleave": (True, False),
    "swiglu_limit": (7.0, 5.0),
    "no_rope_layers": ([1, 0], [0, 0], [1, 1, 0], [1], [1, 2], None),
    "no_rope_layer_interval": (1, 2, 3, 0),
    "sliding_window_pattern": (1, 2, 3),
    "rope_local_base_freq": (100.0, 5e3),
    "use_cache": (True, False),
    "linear_num_key_heads": (1, 3, 4),
    "linear_num_value_heads": (2, 8, 5),
    "linear_key_head_dim": (4, 12),
    "linear_value_head_dim": (4, 16),
    "linear_conv_kernel_dim": (2, 3, 1),
    "full_attention_interval": (1, 2, 3, 0),
    "attn_output_gate": (True, False),
}
"""Values of fields that one or two families read."""


def base_config(family: str, rng: random.Random) -> dict[str, Any]:
    """Return the fields of a small model; its sizes fit the fused decoding kernel or do not."""
    if family == "gpt2":
        return {"model_type": family, **GPT2, **TOKENS}
    config = {"model_type": family, **SIZES, **TOKENS, "max_position_embeddings": 32, **OWN[family]}
    if family != "gpt_neox":
        config["num_key_value_heads"] = 4 if family == "deepseek_v3" else rng.choice((1, 2, 4))
    if "head_dim" not in config and family not in WITHOUT_HEAD_DIM and rng.random() < 0.5:
        config["head_dim"] = 16
    return config


def rope(rng: random.Random) -> Any:
    """Return rotary parameters of any type, sometimes with missing, unused, or invalid entries."""
    kind = rng.choice(("default", "linear", "dynamic", "llama3", "yarn", "yarn", "yarn", "longrope", "longrope", "su"))
    rope = {rng.choice(("rope_type", "type")): kind, "factor": rng.choice((1.0, 2.0, 2.5, 4))}
    pairs = rng.choice((4, 8))
    rope |= {"low_freq_factor": 1.0, "high_freq_factor": rng.choice((4.0, 2))} if kind == "llama3" else {}
    if kind == "longrope":
        rope |= {key: [rng.uniform(1, 3) for _ in range(pairs)] for key in ("short_factor", "long_factor")}
    extra = {
        "original_max_position_embeddings": rng.choice((8, 16, 24)),
        "rope_theta": rng.choice((100.0, 5000)),
        "attention_factor": rng.choice((0.7, 1.5)),
        "beta_fast": rng.choice((16, 8.5)),
        "beta_slow": rng.choice((2, 0.5)),
        "mscale": rng.choice((0.7, 1.2)),
        "mscale_all_dim": rng.choice((0.4, 1.0)),
        "truncate": rng.choice((True, False)),
        "partial_rotary_factor": rng.choice((0.5, 1.0)),
        "finetuned": True,
    }
    share = 0.25 if rng.random() < 0.7 else 0.5
    rope |= {key: value for key, value in extra.items() if rng.random() < (share if key != "finetuned" else 0.05)}
    if rng.random() < 0.15:
        del rope[rng.choice(list(rope))]
    if rng.random() < 0.1:
        rope[rng.choice(list(rope))] = None
    return rng.choice((rope, rope, rope, rope, rope, rope, rope, rope, {}, None))


def edits(rng: random.Random) -> dict[str, Any]:
    """Return a random value for every field that some family, version, or mixin of transformers reads."""
    layers = [rng.choice(("sliding_attention", "full_attention")) for _ in range(rng.choice((2, 2, 2, 1)))]
    layers = rng.choice((layers, layers, ["full_attention"] * 2, ["sliding_attention"] * 2, ["chunked_attention"] * 2,
                         ["linear_attention", "full_attention"], ["linear_attention"] * 2))  # fmt: skip
    choices: dict[str, tuple[Any, ...]] = {
        "rope_scaling": tuple(rope(rng) for _ in range(3)),
        "rope_parameters": tuple(rope(rng) for _ in range(3)),
        "rope_theta": (100, 5e3, 1e6),
        "rotary_emb_base": (100, 5e3),
        "rotary_pct": (0.25, 0.5, 1.0, 0.1),
        "partial_rotary_factor": (0.25, 0.5, 1.0),
        "original_max_position_embeddings": (8, 16),
        "max_position_embeddings": (16, 24, 64),
        "n_positions": (24, 64),
        "layer_types": (layers, None),
        "sliding_window": (0, 1, 3, 5, None, -1),
        "use_sliding_window": FLAGS,
        "max_window_layers": (0, 1, 2, 7),
        "is_causal": (False, True, None),
        "tie_word_embeddings": (True, False),
        **dict.fromkeys(("mlp_bias", "attention_bias", "use_parallel_residual", "norm_topk_prob"), FLAGS),
        "use_bidirectional_attention": (True, False, None),
        **dict.fromkeys(("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon"), (0.0, 0, 1e-3, 0.3, -0.1)),
        **dict.fromkeys(("hidden_act", "hidden_activation", "activation_function"), ACTIVATIONS),
        "head_dim": (8, 16, 12, None),
        "num_key_value_heads": (1, 2, 4, 3, None),
        "num_hidden_layers": (1, 3),
        "intermediate_size": (20, 64),
        "n_inner": (64, None),
        **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping"), (None, 2.0, 0)),
        "query_pre_attn_scalar": (8, 64),
        "scale_attn_weights": (False, True),
        **dict.fromkeys(("scale_attn_by_inverse_layer_idx", "reorder_and_upcast_attn"), (True, False)),
        "num_experts_per_tok": (1, 3, 5),
        **dict.fromkeys(("num_local_experts", "num_experts"), (2, 6)),
        "decoder_sparse_step": (1, 2),
        "mlp_only_layers": ([0], [1], [0, 1], [7], []),
        "router_jitter_noise": (0.0, 0.1),
        "moe_intermediate_size": (16, 24),
        "pad_token_id": (None, 3, -1, 66, 67),
        "eos_token_id": (None, 3, [3, 4], "x"),
        "per_layer_config": ({"0": {"intermediate_size": 64}},),
        "attention_chunk_size": (4,),
        **dict.fromkeys(("attention_dropout", "resid_pdrop", "hidden_dropout", "embd_pdrop"), (0.0, 0.3)),
        "hidden_size": (48, 30),
        "n_embd": (48,),
        "output_router_logits": (True,),
    }
    return {key: rng.choice(values) for key, values in (choices | OF_FEW_FAMILIES).items()}


def edited_config(family: str, known: list[str], rng: random.Random) -> tuple[dict[str, Any], list[str]]:
    """Return a configuration with one to three edits, and the fields that differ.

    Most edits are of the fields ``known`` to the class of the family; some delete a field.
    """
    config, values = base_config(family, rng), edits(rng)
    own = [key for key in values if key in known] + ["rope_scaling"] * 2 * (family != "gpt2")
    changed: list[str] = []
    for _ in range(rng.choice((1, 1, 2, 2, 3))):
        if rng.random() < 0.08:
            changed.append(rng.choice([key for key in config if key != "model_type"]))
            del config[changed[-1]]
        else:
            changed.append(rng.choice(own if rng.random() < 0.75 else list(values)))
            config[changed[-1]] = values[changed[-1]]
    return config, changed
