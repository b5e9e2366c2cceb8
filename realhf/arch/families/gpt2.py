"""GPT-2: layer norms, learned positions, biases everywhere, an ungated MLP. Its matrices are stored as [in, out]."""

from collections.abc import Mapping
from typing import Any

from realhf.api.model_config import ModelConfig
from realhf.arch.families import base
from realhf.arch.families.base import Family, HfTensor, HfTensors

KEYS = {"n_layers": "n_layer", "hidden": "n_embd", "n_heads": "n_head", "vocab": "vocab_size"}


def _from_hf(hf: Mapping[str, Any], scalar_head: bool) -> ModelConfig:
    base.require(hf, scale_attn_weights=True, scale_attn_by_inverse_layer_idx=False, add_cross_attention=False)
    sizes = base.sizes_from_hf(hf, KEYS, scalar_head, tied=True)
    base.require_head_dim(hf, KEYS, sizes)
    return ModelConfig(
        family="gpt2",
        **sizes,
        n_kv_heads=sizes["n_heads"],
        intermediate=base.whole_number(hf, "n_inner", 4 * sizes["hidden"]),
        max_positions=base.whole_number(hf, "n_positions", 1024),
        norm="layer",
        norm_eps=base.number(hf, "layer_norm_epsilon", 1e-5),
        mlp="ungated",
        activation=base.activation(hf, "activation_function", "gelu_new"),
        learned_positions=True,
        qkv_bias=True,
        proj_bias=True,
    )


def _to_hf(config: ModelConfig) -> dict[str, Any]:
    return base.sizes_to_hf(config, KEYS) | {
        "n_inner": config.intermediate,
        "n_positions": config.max_positions,
        "layer_norm_epsilon": config.norm_eps,
        "activation_function": base.HF_ACTIVATIONS[config.activation],
    }


def _block(prefix: str, hidden: int) -> dict[str, HfTensor]:
    """Return one block's tensors by our short names; query, key and value are thirds of one fused tensor."""
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
    "gpt2", "GPT2", _from_hf, _to_hf, hf_tensors,
    base_prefix="transformer.", ignored=(".attn.bias", ".attn.masked_bias"), lm_class="LMHeadModel",
)  # fmt: skip
