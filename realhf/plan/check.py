"""Which layouts a model allows, and the nearest one where one is not."""

import math
from collections.abc import Collection
from fractions import Fraction

from realhf.api.layout import ParallelStrategy
from realhf.api.model import ModelConfig


def strategy_problems(config: ModelConfig, strategy: ParallelStrategy) -> list[str]:
    """Say why a model cannot be cut like this."""
    tp, kv = strategy.tp, config.n_kv_heads
    narrowest = min(width for width in (config.vocab, config.intermediate, config.expert_intermediate) if width)
    problems = []
    if config.n_heads % tp or (kv % tp and tp % kv):  # every rank has whole groups of heads, or a part of one
        problems.append(f"{config.n_heads} heads ({kv} for keys and values) cannot be cut {tp} ways")
    elif tp > narrowest:
        problems.append(f"a width of {narrowest} cannot be cut {tp} ways")
    if strategy.pp > config.n_layers:
        problems.append(f"{config.n_layers} layers cannot be cut into {strategy.pp} stages")
    return problems


def nearest_strategy(wish: ParallelStrategy, world: int, models: Collection[ModelConfig]) -> ParallelStrategy:
    """Return the strategy of ``world`` workers that all models allow and that is nearest to the wish.

    There always is one, data parallelism; of equally near ones it has the fewest stages, then the fewest cuts.
    """
    degrees = [n for n in range(1, world + 1) if world % n == 0]
    cuts = [(tp, pp) for tp in degrees for pp in degrees if world % (tp * pp) == 0]
    strategies = [ParallelStrategy(world // tp // pp, tp, pp) for tp, pp in cuts]
    legal = [s for s in strategies if not any(strategy_problems(model, s) for model in models)]
    return min(legal, key=lambda s: (distance(s, wish), s.pp, s.tp))


def distance(one: ParallelStrategy, other: ParallelStrategy) -> Fraction:
    """Return by which factor the degrees of two strategies differ, over all axes."""
    pairs = ((one.dp, other.dp), (one.tp, other.tp), (one.pp, other.pp))
    return math.prod((Fraction(max(pair), min(pair)) for pair in pairs), start=Fraction(1))
