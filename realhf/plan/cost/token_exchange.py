"""Time of what the ranks of a replica exchange in every block: tokens of experts, keys and values of divided rows."""

from collections.abc import Sequence

from realhf.api.config.choices import Recompute
from realhf.api.layout import Layout
from realhf.plan.cost.speed import CollectiveKind, Speed, StageShard, Work

Pass = tuple[float, float]  # seconds of a forward pass and of a backward pass, which is 0 in inference


def with_exchanges(
    speed: Speed, layout: Layout, work: Work, shard: StageShard, ranks: Sequence[int], pass_: Pass
) -> Pass:
    """Return the seconds of the passes of a stage on ``ranks`` with the exchanges of expert or context parallelism."""
    if layout.strategy.expert_dp > 1:
        return _with_tokens(speed, layout, work, shard, ranks, *pass_)
    return _with_keys(speed, layout, work, shard, ranks, *pass_) if layout.strategy.context else pass_


def _with_tokens(
    speed: Speed, layout: Layout, work: Work, shard: StageShard, ranks: Sequence[int], forward: float, backward: float
) -> Pass:
    """Tokens go to the replicas with their experts and back, in every routed block."""
    rows = work.tokens * shard.model.experts_per_token / shard.tp
    replicas, nbytes = layout.axis("ep", ranks[0]), rows * shard.model.hidden * shard.itemsize
    numbers, tokens = (speed.collective(CollectiveKind.ALL_TO_ALL, size, replicas)
                       for size in (8.0 * shard.model.n_experts, nbytes))  # fmt: skip
    once = shard.n_expert_blocks * (numbers + 2 * tokens)
    again = once if shard.recompute is Recompute.full else 0.0
    return forward + once, backward + (again + shard.n_expert_blocks * 2 * tokens if backward else 0.0)


def _with_keys(
    speed: Speed, layout: Layout, work: Work, shard: StageShard, ranks: Sequence[int], forward: float, backward: float
) -> Pass:
    """Keys and values of all tokens are gathered in every block, and their gradients reduced."""
    members, tokens = layout.axis("tp", ranks[0]), work.tokens * layout.strategy.tp
    nbytes = tokens * 2 * shard.model.n_kv_heads * shard.model.head_dim * shard.itemsize
    gather, reduce = (shard.n_blocks * speed.collective(kind, nbytes, members)
                      for kind in (CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER))  # fmt: skip
    again = gather if shard.recompute is Recompute.full else 0.0
    return forward + gather, backward + (again + reduce if backward else 0.0)
