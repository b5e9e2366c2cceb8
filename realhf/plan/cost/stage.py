"""Pipeline stages and tensor-parallel shards of a model: parameters and saved activations per worker."""

from functools import lru_cache

from realhf.api.experiment import RoleSpec
from realhf.api.layout import ParallelStrategy
from realhf.api.model_config import ModelConfig
from realhf.api.param_box import box_numel, shard_box
from realhf.arch.param_specs import param_specs, stage_layers
from realhf.plan.cost.speed import StageShard


def stage_shards(config: ModelConfig, role: RoleSpec, strategy: ParallelStrategy) -> tuple[StageShard, ...]:
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
    """Return True if a decoding step is one compiled call per stage: the condition of models/fused_decode.py on CPU."""
    return has_kernels and config.is_fusable and strategy.tp == 1


def itemsize(role: RoleSpec) -> int:
    return 2 if role.spec.bf16 else 4


@lru_cache(maxsize=4096)
def shard_numels(config: ModelConfig, tp: int, pp: int) -> tuple[int, ...]:
    """Return, per stage, the parameters of its first tensor rank, which holds at least as many as the others."""
    totals = [0] * pp
    stages = stage_layers(config, pp)
    for spec in param_specs(config):
        numel = box_numel(shard_box(spec, tp, 0))
        for stage, layers in enumerate(stages):
            totals[stage] += numel * spec.is_in(layers)
    return tuple(totals)


def kv_numel(config: ModelConfig, tp: int, n_blocks: int) -> int:
    """Return the key/value cache elements per token of ``n_blocks`` blocks on one worker."""
    return 2 * n_blocks * max(1, config.n_kv_heads // tp) * config.head_dim


def saved_activation_numel(config: ModelConfig, tp: int, sequence_parallel: bool) -> float:
    """Return the elements per token that autograd saves for a block of models/blocks.py.

    They are the residual stream (twice) and its two normalized copies, the QKV projection, rotated queries and keys,
    the attention output, and in the MLP the up projection, the activation and the input of the down projection. With
    sequence parallelism the residual stream holds only this rank's share of the tokens.
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
