"""A model cut into stages and shards: how many parameters each worker holds of it, and what is kept of a token."""

from functools import lru_cache

from realhf.api.experiment import RoleSpec
from realhf.api.layout import ParallelStrategy
from realhf.api.model_config import ModelConfig
from realhf.api.param_box import box_numel, shard_box
from realhf.arch.param_specs import param_specs, stage_layers
from realhf.plan.cost.speed import StageShard


def stage_shards(config: ModelConfig, role: RoleSpec, strategy: ParallelStrategy) -> tuple[StageShard, ...]:
    """Return what each pipeline stage computes."""
    last = config.n_layers + 1
    return tuple(
        StageShard(
            config,
            strategy.tp,
            n_blocks=len(layers) - (0 in layers) - (last in layers),
            first=0 in layers,
            last=last in layers,
            bf16=bool(role.spec.bf16),
            recompute=role.spec.gradient_checkpointing,
            sequence_parallel=role.spec.sequence_parallel and strategy.tp > 1,
        )
        for layers in stage_layers(config, strategy.pp)
    )


def decodes_in_one_call(config: ModelConfig, strategy: ParallelStrategy, has_kernels: bool) -> bool:
    """Tell whether a decoding step is one compiled call through a stage, as models/fused_decode.py decides it on CPUs."""
    return has_kernels and config.is_fusable and strategy.tp == 1


@lru_cache(maxsize=4096)
def shard_numels(config: ModelConfig, tp: int, pp: int) -> tuple[int, ...]:
    """Return, per stage, the parameters of its first tensor rank (the others hold as many, or one unit less)."""
    totals = [0] * pp
    stages = stage_layers(config, pp)
    for spec in param_specs(config):
        numel = box_numel(shard_box(spec, tp, 0))
        for stage, layers in enumerate(stages):
            totals[stage] += numel * spec.is_in(layers)
    return tuple(totals)


def kv_numel(config: ModelConfig, tp: int, n_blocks: int) -> int:
    """Return the elements that the key/value cache of ``n_blocks`` blocks takes per token on one worker."""
    return 2 * n_blocks * max(1, config.n_kv_heads // tp) * config.head_dim


def saved_activation_numel(config: ModelConfig, tp: int, sequence_parallel: bool) -> float:
    """Return the elements that autograd keeps per token and block, as models/blocks.py computes them.

    The residual stream twice and its two normalised copies (a share of the tokens each with sequence parallelism,
    whole ones where products read them), the product of query, key and value, turned queries and keys, what attention
    returns, and of the MLP its wide product, the activated half and what goes into the last product.
    """
    share = tp if sequence_parallel else 1
    heads, kv = config.n_heads / tp, max(1.0, config.n_kv_heads / tp)
    residual = config.hidden * (2 / share + 2)
    attention = config.head_dim * ((heads + 2 * kv) + (heads + kv) + heads)
    copies = 4 if config.mlp == "gated" else 2
    dense = copies * config.intermediate / tp
    if not config.n_experts:
        return residual + attention + dense
    routed = len(config.routed_layers) / config.n_layers
    per_expert = (copies * config.expert_intermediate / tp + 2 * config.hidden) * config.experts_per_token
    return residual + attention + (1 - routed) * dense + routed * (per_expert + 3 * config.n_experts)
