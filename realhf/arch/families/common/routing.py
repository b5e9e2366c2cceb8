"""The routed experts of DeepSeek-V3 and the families that route as it does: sigmoid scores, groups, a shared expert."""

from collections.abc import Mapping
from typing import Any

from realhf.api.model_config import ModelConfig
from realhf.arch.families.common import fields


def from_hf(
    hf: Mapping[str, Any], n_experts: int, intermediate: int, groups: tuple[int, int], n_dense: int, scale: float
) -> dict[str, Any]:
    """Read routed experts with a family's defaults; the first ``n_dense`` blocks have none. No loss balances them."""
    count = fields.agreed(hf, "n_routed_experts", "num_local_experts", default=n_experts)
    count = fields.whole_number({"n_routed_experts": count}, "n_routed_experts")
    wide = fields.whole_number(hf, "moe_intermediate_size", intermediate)
    n_groups, n_used = (
        fields.whole_number(hf, key, n) for key, n in zip(("n_group", "topk_group"), groups, strict=True)
    )
    if n_used > n_groups or count % n_groups:
        raise ValueError(f"fields 'n_routed_experts', 'n_group' and 'topk_group' are {count} experts in {n_groups} "
                         f"groups, of which a token uses {n_used}")  # fmt: skip
    if n_used < n_groups and count // n_groups < 2:
        raise ValueError(f"field 'n_group' is {n_groups}: groups are ranked by two experts, these have "
                         f"{count // n_groups}")  # fmt: skip
    n_dense = int(fields.number(hf, "first_k_dense_replace", n_dense, minimum=0))
    hf.get("num_nextn_predict_layers")  # layers that predict further tokens are not read
    return {
        "n_experts": count,
        "experts_per_token": fields.whole_number(hf, "num_experts_per_tok", 8),
        "expert_intermediate": wide,
        "expert_scores": "sigmoid",
        "choice_bias": True,
        "expert_groups": (n_groups, n_used),
        "expert_scale": fields.number(hf, "routed_scaling_factor", scale),
        "renormalise_experts": fields.flag(hf, "norm_topk_prob", True),
        "shared_intermediate": wide * fields.whole_number(hf, "n_shared_experts", 1),
        "dense_layers": tuple(range(min(n_dense, fields.whole_number(hf, "num_hidden_layers")))),
    }


def to_hf(config: ModelConfig) -> dict[str, Any]:
    n_groups, n_used = config.expert_groups
    return {
        "n_routed_experts": config.n_experts,
        "num_experts_per_tok": config.experts_per_token,
        "moe_intermediate_size": config.expert_intermediate,
        "n_group": n_groups,
        "topk_group": n_used,
        "routed_scaling_factor": config.expert_scale,
        "norm_topk_prob": config.renormalise_experts,
        "n_shared_experts": config.shared_intermediate // config.expert_intermediate,
        "first_k_dense_replace": len(config.dense_layers),
        "num_nextn_predict_layers": 0,
    }
