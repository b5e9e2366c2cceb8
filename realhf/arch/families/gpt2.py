"""GPT-2: layer norms, learned positions, biases everywhere, a plain MLP. Its matrices are stored as [in, out]."""

from collections.abc import Mapping
from typing import Any

from realhf.api.model_config import ModelConfig
from realhf.arch.families import base
from realhf.arch.families.base import Family, HfTensor, HfTensors


def _from_hf(hf: Mapping[str, Any], scalar_head: bool) -> ModelConfig:
    base.refuse(hf, scale_attn_weights=True, scale_attn_by_inverse_layer_idx=False, add_cross_attention=False)
    hidden, n_heads = base.whole_number(hf, "n_embd"), base.whole_number(hf, "n_head")
    if hidden % n_heads:
        raise ValueError(f"field 'n_embd' is {hidden}, not a multiple of n_head ({n_heads})")
    return ModelConfig(
        family="gpt2",
        n_layers=base.whole_number(hf, "n_layer"),
        hidden=hidden,
        n_heads=n_heads,
        n_kv_heads=n_heads,
        head_dim=hidden // n_heads,
        intermediate=base.whole_number(hf, "n_inner", 4 * hidden),
        vocab=base.whole_number(hf, "vocab_size"),
        max_positions=base.whole_number(hf, "n_positions", 1024),
        head="scalar" if scalar_head else "lm",
        norm="layer",
        norm_eps=base.number(hf, "layer_norm_epsilon", 1e-5),
        mlp="ungated",
        activation=base.activation(hf, "activation_function", "gelu_new"),
        learned_positions=True,
        qkv_bias=True,
        proj_bias=True,
        tied_embedding=bool(hf.get("tie_word_embeddings", True)) and not scalar_head,
        init_std=base.number(hf, "initializer_range", 0.02),
        **base.token_ids(hf),
    )


def _to_hf(config: ModelConfig) -> dict[str, Any]:
    return {
        "n_layer": config.n_layers,
        "n_embd": config.hidden,
        "n_head": config.n_heads,
        "n_inner": config.intermediate,
        "n_positions": config.max_positions,
        "vocab_size": config.vocab,
        "layer_norm_epsilon": config.norm_eps,
        "activation_function": base.HF_ACTIVATIONS[config.activation],
        "tie_word_embeddings": config.tied_embedding and config.head == "lm",
        "initializer_range": config.init_std,
        **base.token_ids_to_hf(config),
    }


def _block(prefix: str, hidden: int) -> dict[str, HfTensor]:
    """Names of one block by our short names; query, key and value are thirds of one fused tensor."""
    tensors = {
        "attn_norm.weight": HfTensor("ln_1.weight"),
        "attn_norm.bias": HfTensor("ln_1.bias"),
        "wo": HfTensor("attn.c_proj.weight", transpose=True),
        "bo": HfTensor("attn.c_proj.bias"),
        "mlp_norm.weight": HfTensor("ln_2.weight"),
        "mlp_norm.bias": HfTensor("ln_2.bias"),
        "up": HfTensor("mlp.c_fc.weight", transpose=True),
        "b_up": HfTensor("mlp.c_fc.bias"),
        "down": HfTensor("mlp.c_proj.weight", transpose=True),
        "b_down": HfTensor("mlp.c_proj.bias"),
    }
    for third, part in enumerate("qkv"):
        columns = (third * hidden, (third + 1) * hidden)
        tensors[f"w{part}"] = HfTensor("attn.c_attn.weight", transpose=True, box=((0, hidden), columns))
        tensors[f"b{part}"] = HfTensor("attn.c_attn.bias", box=(columns,))
    return {ours: HfTensor(prefix + t.name, t.transpose, t.box) for ours, t in tensors.items()}


def hf_tensors(config: ModelConfig) -> HfTensors:
    tensors = {
        "embed.weight": HfTensor("transformer.wte.weight"),
        "embed.positions": HfTensor("transformer.wpe.weight"),
        "final_norm.weight": HfTensor("transformer.ln_f.weight"),
        "final_norm.bias": HfTensor("transformer.ln_f.bias"),
    }
    for i in range(config.n_layers):
        block = _block(f"transformer.h.{i}.", config.hidden)
        tensors |= {f"layers.{i}.{ours}": tensor for ours, tensor in block.items()}
    if config.head == "scalar":
        tensors["head.weight"] = HfTensor("score.weight")
    elif not config.tied_embedding:
        tensors["head.weight"] = HfTensor("lm_head.weight")
    return {ours: (tensor,) for ours, tensor in tensors.items()}


GPT2 = Family(
    name="gpt2",
    hf_architectures=("GPT2LMHeadModel", "GPT2ForSequenceClassification"),
    base_prefix="transformer.",
    config_from_hf=_from_hf,
    config_to_hf=_to_hf,
    hf_tensors=hf_tensors,
    ignored=(".attn.bias", ".attn.masked_bias"),
)
