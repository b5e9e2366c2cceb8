"""Communication during backward passes: the seconds by which it lengthens them.

Gradients are reduced over replicas while the last backward pass of a step runs (``models/engine/grad_reduction.py``).
Sums of input gradients over tensor-parallel ranks run during the products of weight gradients
(``models/column_parallel.py``). The operations do not slow each other down.
"""

from collections.abc import Sequence
from functools import lru_cache

from realhf.api.config.choices import Backend
from realhf.api.experiment import RoleSpec
from realhf.api.layout import ParallelStrategy
from realhf.api.model_config import ModelConfig
from realhf.api.param_box import ParamSpec, box_numel, shard_box
from realhf.arch.lora import is_adapter, own_specs
from realhf.arch.param_specs import stage_layers
from realhf.plan.cost.speed import CollectiveKind, Speed, StageShard

BUCKET_NUMEL = 1 << 25  # most elements of a bucket (models/engine/grad_reduction.py)


def overlaps_grad_reduce(role: RoleSpec, strategy: ParallelStrategy) -> bool:
    """Return True if gradients are reduced during the backward pass; megatron-core's are reduced after it."""
    return role.spec.overlap_grad_reduce is True and role.spec.backend is Backend.native and strategy.weight_dp > 1


def reduction_seconds(
    speed: Speed,
    shard: StageShard,
    role: RoleSpec,
    strategy: ParallelStrategy,
    stage: int,
    numel: int,
    ranks: Sequence[int],
    backward_s: float,
) -> float:
    """Return the seconds of reducing ``numel`` gradients over ``ranks`` after the backward pass has ended.

    ``backward_s`` is the duration of the stage's last backward pass. Without overlap the reduction is one
    reduce-scatter; with it, the sum of every bucket is reduced to the rank that owns it.
    """
    if not overlaps_grad_reduce(role, strategy):
        return speed.collective(CollectiveKind.REDUCE_SCATTER, 4 * numel, ranks)
    n_buckets = strategy.weight_dp * max(1, -(-numel // (strategy.weight_dp * BUCKET_NUMEL)))
    # a reduction to one rank takes as long as a broadcast from it
    seconds = n_buckets * speed.collective(CollectiveKind.BROADCAST, 4 * numel / n_buckets, ranks)
    last = numel_after_backward(shard.model, strategy, stage, role.spec.sequence_parallel)
    last = min(numel, max(last, numel // n_buckets))
    return exposed_reduction(seconds, last / max(numel, 1), backward_s, shard.n_blocks)


def exposed_reduction(seconds: float, last_share: float, backward_s: float, n_blocks: int) -> float:
    """Return the seconds of a reduction that remain after a backward pass of ``n_blocks`` blocks.

    The reduction starts after the first block and takes ``seconds`` in all, of which the ``last_share`` can only start
    after the pass.
    """
    hidden = backward_s * (n_blocks - 1) / max(n_blocks, 1)
    return max(0.0, (1 - last_share) * seconds - hidden) + last_share * seconds


@lru_cache(maxsize=4096)
def numel_after_backward(config: ModelConfig, strategy: ParallelStrategy, stage: int, sequence_parallel: bool) -> int:
    """Return the gradients of a worker that are complete only when the backward pass of its stage has ended.

    These are the embedding's, those of the stage's first block, and all that several workers of a replica sum.
    """
    layers = stage_layers(config, strategy.pp, strategy.vpp)[stage]
    first_block = max(min(layers), 1)
    return sum(
        box_numel(shard_box(spec, strategy.weight_tp, 0))
        for spec in own_specs(config)
        if spec.is_in(layers) and (spec.layer <= first_block or is_summed(spec, strategy, sequence_parallel))
    )


def is_summed(spec: ParamSpec, strategy: ParallelStrategy, sequence_parallel: bool) -> bool:
    """Return True if workers of a replica have parts of the gradient (``SharedGradients`` of the optimizer)."""
    if spec.shared_layer is not None and strategy.pp > 1:
        return True
    if spec.tp_dim is not None:
        return (spec.tp_units or spec.shape[spec.tp_dim]) < strategy.weight_tp
    return strategy.weight_tp > 1 and (is_adapter(spec.name) or (sequence_parallel and spec.shape[0] > 1))


def exposed_tp_backward(
    product_s: Sequence[float], all_reduce_s: float, all_gather_s: float, reduce_scatter_s: float, shard: StageShard
) -> float:
    """Return the seconds of tensor-parallel collectives that lengthen the backward pass of a block.

    ``product_s`` has, for each column-parallel layer, the seconds of one of the two products of its backward pass.
    Collectives are those of the hidden states of all tokens. Each column-parallel layer is followed by a row-parallel
    one, whose output gradient is gathered with sequence parallelism, during no product.
    """
    if shard.tp == 1:
        return 0.0
    n = len(product_s)
    if not shard.tp_overlap:
        return n * (reduce_scatter_s + all_gather_s if shard.sequence_parallel else all_reduce_s)
    if not shard.sequence_parallel:
        return sum(max(0.0, all_reduce_s - seconds) for seconds in product_s)
    exposed = (max(0.0, all_gather_s - s) + max(0.0, reduce_scatter_s - s) for s in product_s)
    return sum(exposed) + n * all_gather_s
