"""Gemma: Llama with scaled embeddings, norm weights with an offset of one, and a GELU gate."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from realhf.api.model_config import ModelConfig
from realhf.arch.families import base, llama
from realhf.arch.families.base import Family


def sizes_from_hf(hf: Mapping[str, Any], family: str, scalar_head: bool, activation: str) -> ModelConfig:
    """Read the sizes of Gemma and Gemma 2; ``activation`` is the name of that field.

    The value ``gelu`` stands for the tanh form, which the weights were trained with.
    """
    base.require(hf, use_bidirectional_attention=False)
    sizes = llama.sizes_from_hf(hf, family, scalar_head, 8192, head_dim=256, tied=True)
    form = base.activation(hf, activation, "gelu_pytorch_tanh")
    return replace(
        llama.with_attention_bias(sizes, hf),
        norm_offset=1.0,
        scaled_embedding=True,
        activation="gelu_tanh" if form == "gelu" else form,
    )


def _from_hf(hf: Mapping[str, Any], scalar_head: bool) -> ModelConfig:
    return sizes_from_hf(hf, "gemma", scalar_head, "hidden_act")


def _to_hf(config: ModelConfig) -> dict[str, Any]:
    fields = llama.sizes_to_hf(config)
    # transformers 4.39 to 4.57 read the second name
    return fields | {"attention_bias": config.qkv_bias, "hidden_activation": fields["hidden_act"]}


GEMMA = Family("gemma", "Gemma", _from_hf, _to_hf, llama.hf_tensors)
