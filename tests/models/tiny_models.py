"""Tiny random Hugging Face models of every family, with the options of released models."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GemmaConfig,
    GemmaForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from realhf.api.model_config import ModelConfig
from realhf.api.param_box import whole
from realhf.arch.hf_config import read_hf_config
from realhf.arch.param_specs import param_specs
from realhf.models.flat_params import FlatParams
from realhf.models.hf_folder import load_hf
from realhf.models.transformer import Transformer

VOCAB = 67
COMMON = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 50}
COMMON |= {"vocab_size": VOCAB, "max_position_embeddings": 64, "initializer_range": 0.2}
COMMON |= {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
SIZES = {**COMMON, "num_key_value_heads": 2}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 16}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 8}
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}
GPT2 = {"vocab_size": VOCAB, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "initializer_range": 0.2}
GPT2 |= {"bos_token_id": 1, "eos_token_id": 2}
# expert sizes are multiples of 8 for grouped products
MOE = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 12}
BALANCE = {"router_aux_loss_coef": 0.5}
WINDOW = 4
CAPS = {"attn_logit_softcapping": 1.5, "final_logit_softcapping": 2.0, "query_pre_attn_scalar": 24}
PARTIAL = {"rope_theta": 1e3, "rope_type": "default", "partial_rotary_factor": 0.25}

HYBRID = {"linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 6, "linear_value_head_dim": 5,
          "head_dim": 12, "rope_parameters": PARTIAL | {"partial_rotary_factor": 0.5}}  # fmt: skip
HYBRID |= {"initializer_range": 0.1, "rms_norm_eps": 1e-2}  # else small outputs of heads magnify rounding
SHARED = {**MOE, **BALANCE, "shared_expert_intermediate_size": 20}

OTHERS: dict[str, dict[str, Any]] = {
    "gemma3_text": {"head_dim": 12, "query_pre_attn_scalar": 24, "sliding_window": WINDOW,
                    "layer_types": ["sliding_attention", "full_attention"], "rope_local_base_freq": 100.0},
    "olmo3": {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]},
    "phi3": {"rope_parameters": PARTIAL | {"partial_rotary_factor": 0.5}},
    "glm": {"head_dim": 12, "rope_parameters": PARTIAL | {"partial_rotary_factor": 0.5}},
    "glm4": {"head_dim": 12, "rope_parameters": PARTIAL | {"partial_rotary_factor": 0.5}},
    "granite": {"embedding_multiplier": 2.0, "attention_multiplier": 0.3, "residual_multiplier": 0.4,
                "logits_scaling": 3.0},
    "cohere2": {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"], "logit_scale": 0.4},
    "smollm3": {"no_rope_layers": [1, 0]},
    "seed_oss": {"head_dim": 12, "attention_out_bias": True},
    "ministral": {"sliding_window": WINDOW, "layer_types": ["full_attention", "sliding_attention"], "head_dim": 12},
    "ministral3": {"head_dim": 12, "rope_parameters": YARN | {"llama_4_scaling_beta": 0.5}},
    "qwen2_moe": {**MOE, **BALANCE, "shared_expert_intermediate_size": 20},
    "olmoe": {"intermediate_size": 24, "num_experts": 6, "num_experts_per_tok": 2, **BALANCE},
    "glm4_moe": {"n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 12,
                 "first_k_dense_replace": 1, "use_qk_norm": True, "routed_scaling_factor": 1.5, "n_group": 3,
                 "topk_group": 2},
    "deepseek_v3": {"n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "kv_lora_rank": 12,
                    "q_lora_rank": 20, "qk_rope_head_dim": 8, "qk_nope_head_dim": 6, "v_head_dim": 10, "n_group": 3,
                    "topk_group": 2, "first_k_dense_replace": 1, "num_key_value_heads": 4,
                    "rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 0.8}},
    "gpt_oss": {"intermediate_size": 24, "num_local_experts": 6, "num_experts_per_tok": 2, "head_dim": 12,
                "sliding_window": WINDOW, "rope_parameters": YARN | {"truncate": False}, **BALANCE},
    "qwen3_next": {**HYBRID, **SHARED, "layer_types": ["linear_attention", "full_attention"]},
    "qwen3_5_text": {**HYBRID, "layer_types": ["full_attention", "linear_attention"]},
    "qwen3_5_moe_text": {**HYBRID, **SHARED, "layer_types": ["linear_attention", "full_attention"]},
}  # fmt: skip
"""Fields of further families, whose names are their ``model_type``."""


def of_config(model_type: str, **own: Any) -> PreTrainedModel:
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **SIZES | own))


MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES)),
    "llama_tied": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=True, attention_bias=True)),
    "llama_scaled": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, head_dim=16, rope_parameters=LLAMA3)),
    "llama_linear": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, rope_parameters=LINEAR)),
    "llama_biases": lambda: LlamaForCausalLM(
        LlamaConfig(**{**SIZES, "pad_token_id": 5}, mlp_bias=True, hidden_act="relu2")
    ),
    "llama_yarn": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, rope_parameters=YARN)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES, tie_word_embeddings=True)),
    "qwen2_window": lambda: Qwen2ForCausalLM(
        Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1)
    ),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=12, attention_bias=True)),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**SIZES, sliding_window=WINDOW)),
    "mistral_open": lambda: MistralForCausalLM(MistralConfig(**SIZES, sliding_window=None, head_dim=12)),
    "gemma": lambda: GemmaForCausalLM(GemmaConfig(**COMMON, num_key_value_heads=1, head_dim=12)),
    "gemma2": lambda: Gemma2ForCausalLM(Gemma2Config(**SIZES, head_dim=12, sliding_window=WINDOW, **CAPS)),
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(**GPT2)),
    "gpt_neox": lambda: GPTNeoXForCausalLM(GPTNeoXConfig(**COMMON, rope_parameters=PARTIAL)),
    "gpt_neox_serial": lambda: GPTNeoXForCausalLM(
        GPTNeoXConfig(**COMMON, use_parallel_residual=False, rotary_pct=1.0, tie_word_embeddings=True)
    ),
    "mixtral": lambda: MixtralForCausalLM(
        MixtralConfig(**{**SIZES, "intermediate_size": 52}, **BALANCE, num_local_experts=5, sliding_window=WINDOW)
    ),
    **{name: partial(of_config, name, **own) for name, own in OTHERS.items()},
    "olmo2": lambda: Olmo2ForCausalLM(Olmo2Config(**SIZES)),
    "olmo2_bias": lambda: Olmo2ForCausalLM(Olmo2Config(**SIZES, attention_bias=True, tie_word_embeddings=True)),
    "qwen3_moe": lambda: Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **MOE, **BALANCE, norm_topk_prob=True)),
    "qwen3_moe_some": lambda: Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **MOE, **BALANCE, mlp_only_layers=[0])),
}
WIDE = {**SIZES, "intermediate_size": 48}
GROUPED: dict[str, Callable[[], PreTrainedModel]] = {
    "grouped llama": lambda: LlamaForCausalLM(LlamaConfig(**WIDE)),
    "grouped qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**WIDE, head_dim=12, attention_bias=True)),
    "grouped gpt2": MODELS["gpt2"],
    "grouped gemma2": lambda: Gemma2ForCausalLM(Gemma2Config(**WIDE, head_dim=12, sliding_window=WINDOW, **CAPS)),
    "grouped gpt_neox": lambda: GPTNeoXForCausalLM(
        GPTNeoXConfig(**{**COMMON, "intermediate_size": 48}, rope_parameters=PARTIAL)
    ),
}
"""Models whose rows, also those of two shards, are whole groups of 4 weights, for quantization."""
DEEP: dict[str, Callable[[], PreTrainedModel]] = {
    "deep llama": lambda: of_config("llama", num_hidden_layers=4),
    "deep qwen2": lambda: of_config("qwen2", num_hidden_layers=5, tie_word_embeddings=True),
    "deep gemma2": lambda: of_config("gemma2", num_hidden_layers=6, head_dim=12, sliding_window=WINDOW, **CAPS),
    "deep gpt2": lambda: GPT2LMHeadModel(GPT2Config(**GPT2 | {"n_layer": 4})),
    "deep qwen3_moe": lambda: of_config("qwen3_moe", **MOE, **BALANCE, norm_topk_prob=True, num_hidden_layers=5,
                                        mlp_only_layers=[1]),
    "deep deepseek_v3": lambda: of_config("deepseek_v3", **OTHERS["deepseek_v3"], num_hidden_layers=4),
}  # fmt: skip
"""Models with enough layers for several chunks per pipeline stage."""
WHOLE = {"hidden_size": 64, "intermediate_size": 64, "head_dim": 16}
OF_EXPERTS = {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}
FUSED: dict[str, Callable[[], PreTrainedModel]] = {
    "fused llama": lambda: of_config("llama", **WHOLE, attention_bias=True, mlp_bias=True),
    "fused gpt2": lambda: GPT2LMHeadModel(GPT2Config(**GPT2 | {"n_embd": 64})),
    "fused gemma2": lambda: Gemma2ForCausalLM(Gemma2Config(**SIZES | WHOLE, sliding_window=WINDOW, **CAPS)),
    "fused gpt_neox": lambda: GPTNeoXForCausalLM(
        GPTNeoXConfig(**COMMON | {"hidden_size": 64, "intermediate_size": 64}, rope_parameters=PARTIAL)
    ),
    "fused qwen3": lambda: of_config("qwen3", **WHOLE, num_key_value_heads=1),
    "fused granite": lambda: of_config("granite", **OTHERS["granite"], hidden_size=64, intermediate_size=64),
    "fused olmo3": lambda: of_config("olmo3", **OTHERS["olmo3"], hidden_size=64, intermediate_size=64),
    "fused olmoe": lambda: of_config("olmoe", **OTHERS["olmoe"] | {"hidden_size": 64, "intermediate_size": 64}),
    "fused gpt_oss": lambda: of_config("gpt_oss", **OTHERS["gpt_oss"] | WHOLE),
    "fused glm4_moe": lambda: of_config("glm4_moe", **OTHERS["glm4_moe"] | WHOLE | {"moe_intermediate_size": 32}),
    "fused deepseek_v3": lambda: of_config(
        "deepseek_v3", **OTHERS["deepseek_v3"] | {"moe_intermediate_size": 32}, hidden_size=64, intermediate_size=64
    ),
    **{
        f"fused {name}": partial(of_config, name, **OTHERS[name] | WHOLE | OF_EXPERTS)
        for name in ("qwen2_moe", "qwen3_next")
    },
}
"""Models of which a kernel decodes blocks, also those of two shards, as far as it computes the family."""
ONE_OF_EACH = (
    "llama",
    "qwen2",
    "qwen3",
    "mistral",
    "gemma",
    "gemma2",
    "gpt2",
    "gpt_neox",
    "mixtral",
    "qwen3_moe",
    "olmo2",
    *OTHERS,
)
WITH_EXPERTS = ("mixtral", "qwen3_moe", "qwen2_moe", "olmoe", "glm4_moe", "gpt_oss", "deepseek_v3", "qwen3_next",
                "qwen3_5_moe_text")  # fmt: skip


BLOCKS = {"hidden_size": 64, "intermediate_size": 32, "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16}
BLOCKED = {"gpt_oss_blocks": lambda: of_config("gpt_oss", **BLOCKS)}
"""Models with whole blocks of MXFP4."""


def hf_model(name: str) -> PreTrainedModel:
    """Return a random Hugging Face model, with random biases and norms."""
    torch.manual_seed(0)
    model = {**MODELS, **GROUPED, **DEEP, **BLOCKED, **FUSED}[name]().eval()
    with torch.no_grad():
        for param_name, param in model.named_parameters():
            if param.ndim == 1:
                param.add_(0.1 * torch.randn_like(param))
            if param_name.endswith("A_log"):
                param.sub_(4.0)  # without this a state forgets the token before, and rounding of small outputs shows
    return model


def whole_params(config: ModelConfig, dtype: torch.dtype = torch.float32) -> FlatParams:
    specs = param_specs(config)
    return FlatParams(specs, {spec.name: whole(spec.shape) for spec in specs}, dtype, "cpu")


def load_model(folder: Path, scalar_head: bool = False, seed: int = 0) -> Transformer:
    """Load our model from a folder; a missing scalar head is initialised."""
    config = read_hf_config(folder, scalar_head)
    params = whole_params(config)
    load_hf(folder, config, params, seed, frozenset({"head.weight"}) if scalar_head else frozenset())
    return Transformer(config, params)


def both_models(name: str, folder: Path) -> tuple[PreTrainedModel, Transformer]:
    """Return a random Hugging Face model, and ours with the same weights."""
    model = hf_model(name)
    model.save_pretrained(folder)
    return model, load_model(folder)
