"""Models of published points: their sizes, with everything else as in llama."""

from collections.abc import Mapping
from typing import Any

from realhf.api.model_config import Lora, ModelConfig

GATED = ("llama", "mixtral")


def model_of(point: Mapping[str, Any]) -> ModelConfig:
    """Return a model of these sizes; norms, biases and positions are those of llama."""
    fields = point["model"]
    heads, n_experts = fields["heads"], fields.get("experts", 0)
    return ModelConfig(
        "mixtral" if n_experts else "llama", fields["layers"], fields["hidden"], heads, fields.get("kv_heads", heads),
        fields.get("head_dim", fields["hidden"] // heads), fields["intermediate"], fields["vocab"], 1 << 20,
        mlp="gated" if fields["family"] in GATED else "ungated", n_experts=n_experts,
        experts_per_token=fields.get("experts_per_token", 0),
        expert_intermediate=fields["intermediate"] if n_experts else 0,
        lora=Lora(point["lora_rank"]) if "lora_rank" in point else None, tied_embedding=fields.get("tied", False),
    )  # fmt: skip
