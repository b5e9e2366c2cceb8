"""Qwen3-Next and the text models of Qwen3.5: the gated delta rule in most layers, gated attention in the others.

Qwen3-Next and the MoE version of Qwen3.5 have routed experts beside a gated shared one.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

from realhf.api.model_config import ModelConfig
from realhf.arch.families import llama, mistral, qwen
from realhf.arch.families.common import base, fields, gated_delta
from realhf.arch.families.common.base import Family, HfTensors
from realhf.arch.families.common.rotary import parameters, partial_rotary, partial_rotary_to_hf

OF_IMAGES = ("mrope_section", "mrope_interleaved")
"""Rotary parameters without effect on text, whose three positions are equal."""
UNUSED = frozenset({"mamba_ssm_dtype", "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings"})


def _from_hf(hf: Mapping[str, Any], scalar_head: bool, family: str, n_kv: int, **own: Any) -> ModelConfig:
    fields.require(hf, attn_output_gate=True, use_sliding_window=False)
    rotated = {key: value for key, value in parameters(hf).items() if key not in OF_IMAGES}
    stored = fields.replaced(hf, rope_parameters=rotated, rope_scaling=None)
    own |= {
        "norm_offset": 1.0,
        "qk_norm": "head",
        "attention_gate": True,
        "sliding_windows": (),
        "read_rotary": lambda n, head_dim: partial_rotary(stored, n, head_dim, 0.25),
        **llama.attention_bias(hf),
        **gated_delta.from_hf(hf),
    }
    return llama.config_from_hf(hf, family, scalar_head, 32768, n_kv, head_dim=256, **own)


def _dense_from_hf(hf: Mapping[str, Any], scalar_head: bool) -> ModelConfig:
    return _from_hf(hf, scalar_head, "qwen3_5_text", 4)


def _next_from_hf(hf: Mapping[str, Any], scalar_head: bool) -> ModelConfig:
    own = {"dense_layers": qwen.dense_layers(hf), "renormalise_experts": fields.flag(hf, "norm_topk_prob", True)}
    return _from_hf(hf, scalar_head, "qwen3_next", 2, **own, **_experts(hf, 512, 10))


def _moe_from_hf(hf: Mapping[str, Any], scalar_head: bool) -> ModelConfig:
    experts = _experts(hf, 256, 8)
    # no layer has a dense MLP
    sizes = fields.replaced(hf, intermediate_size=experts["expert_intermediate"])
    return _from_hf(sizes, scalar_head, "qwen3_5_moe_text", 2, **experts)


def _experts(hf: Mapping[str, Any], n_experts: int, per_token: int) -> dict[str, Any]:
    return {
        "n_experts": mistral.n_experts(hf, n_experts),
        "experts_per_token": fields.whole_number(hf, "num_experts_per_tok", per_token),
        "expert_intermediate": fields.whole_number(hf, "moe_intermediate_size", 512),
        "shared_intermediate": fields.whole_number(hf, "shared_expert_intermediate_size", 512),
        "shared_gate": True,
        "balance_loss": fields.number(hf, "router_aux_loss_coef", 0.001, minimum=0),
    }


def _to_hf(config: ModelConfig) -> dict[str, Any]:
    found = llama.config_to_hf(config) | partial_rotary_to_hf(config) | gated_delta.to_hf(config)
    found["attention_bias"] = config.qkv_bias
    if config.n_experts:
        found |= qwen.routed_to_hf(config) | {"shared_expert_intermediate_size": config.shared_intermediate}
    return found


def _moe_to_hf(config: ModelConfig) -> dict[str, Any]:
    without = ("intermediate_size", "decoder_sparse_step", "mlp_only_layers", "norm_topk_prob")
    return {key: value for key, value in _to_hf(config).items() if key not in without}


def _mixer(config: ModelConfig, layer: int, is_split: bool) -> HfTensors:
    """Return the tensors of attention, whose queries and gates are stored head by head, or of the delta rule."""
    if layer in config.delta_layers:
        return gated_delta.tensors(config, is_split)
    tensors, size = base.whole_tensors(llama.attention_names(config)), config.head_dim
    name, columns = "self_attn.q_proj", ((0, config.hidden),)
    tensors |= gated_delta.rows(f"{name}.weight", {"wq": size, "wg": size}, columns, config.n_heads)
    if config.qkv_bias:
        tensors |= gated_delta.rows(f"{name}.bias", {"bq": size, "bg": size}, (), config.n_heads)
    return tensors


def _tensors(config: ModelConfig, is_split: bool) -> HfTensors:
    mixer = partial(_mixer, config, is_split=is_split)
    return llama.hf_tensors(config, routed_mlp="mlp", shared="shared_expert", mixer=mixer)


QWEN3_NEXT = Family(
    "qwen3_next", "Qwen3Next", _next_from_hf, _to_hf, partial(_tensors, is_split=False), extra_layers=True
)
QWEN3_5 = Family(
    "qwen3_5_text", "Qwen3_5", _dense_from_hf, _to_hf, partial(_tensors, is_split=True), extra_layers=True,
    scalar_class="Qwen3_5TextForSequenceClassification", unused=UNUSED,
)  # fmt: skip
QWEN3_5_MOE = Family(
    "qwen3_5_moe_text", "Qwen3_5Moe", _moe_from_hf, _moe_to_hf, partial(_tensors, is_split=True), extra_layers=True,
    unused=UNUSED | {"intermediate_size"},
)  # fmt: skip
