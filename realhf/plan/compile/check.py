"""Checks of graphs and parallel strategies before a run, and the nearest valid strategy of an invalid one."""

import math
from collections.abc import Collection, Sequence
from fractions import Fraction

from realhf.api.graph import MFC
from realhf.api.layout import ParallelStrategy
from realhf.api.model_config import ModelConfig
from realhf.base.errors import did_you_mean


def key_problems(mfcs: Sequence[MFC], given: Collection[str], data: str) -> list[str]:
    """Return an error for every input key without a producer: an MFC, or the data set named ``data``."""
    made = {key for m in mfcs for key in m.outputs}
    readers: dict[str, list[str]] = {}
    for m in mfcs:
        for key in sorted({*m.inputs} - made - {*given}):
            readers.setdefault(key, []).append(m.name)
    return [
        f"{' and '.join(names)} {'needs' if len(names) == 1 else 'need'} '{key}': no MFC produces it, "
        f"and {data} has only {', '.join(sorted(given))}{did_you_mean(key, sorted(made | {*given}))}"
        for key, names in readers.items()
    ]


def model_problems(mfcs: Sequence[MFC], roles: Collection[str]) -> list[str]:
    """Return an error for every MFC whose role is not among ``roles``, which have a model."""
    known = ", ".join(roles) or "none"
    return [
        f"MFC {m.name}: role '{m.role}' has no model (roles with one: {known}){did_you_mean(m.role, roles)}"
        for m in mfcs
        if m.role is not None and m.role not in roles
    ]


def graph_notes(mfcs: Sequence[MFC], roles: Collection[str], logged: Collection[str]) -> list[str]:
    """Return notes on unused outputs and models. ``logged`` are keys that every run logs."""
    wanted = {*logged, *(key for m in mfcs for key in m.inputs)}
    unread = {m.name: [key for key in m.outputs if key not in wanted] for m in mfcs}
    notes = [f"no MFC reads {', '.join(keys)} of {name}" for name, keys in unread.items() if keys]
    used = {m.role for m in mfcs}
    return notes + [f"no MFC uses the model of role '{role}'" for role in roles if role not in used]


def divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def all_strategies(world: int) -> list[ParallelStrategy]:
    """Return the strategies for ``world`` workers, by tensor, then pipeline parallelism."""
    return [ParallelStrategy(world // tp // pp, tp, pp) for tp in divisors(world) for pp in divisors(world // tp)]


def strategy_problems(config: ModelConfig, strategy: ParallelStrategy) -> list[str]:
    """Return the reasons why a model cannot be sharded with a strategy."""
    tp, kv = strategy.tp, config.n_kv_heads
    smallest_dim = min(width for width in (config.vocab, config.intermediate, config.expert_intermediate) if width)
    problems = []
    if config.n_heads % tp or (kv % tp and tp % kv):  # a rank has whole groups of heads or a part of one group
        problems.append(f"{config.n_heads} heads ({kv} KV heads) are not divisible by tensor-parallel size {tp}")
    elif tp > smallest_dim:
        problems.append(f"a dimension of {smallest_dim} is smaller than tensor-parallel size {tp}")
    if strategy.pp > config.n_layers:
        problems.append(f"{config.n_layers} layers are fewer than {strategy.pp} pipeline stages")
    return problems


def nearest_strategy(requested: ParallelStrategy, world: int, models: Collection[ModelConfig]) -> ParallelStrategy:
    """Return the strategy for ``world`` workers that is valid for all models and nearest to the requested one.

    One always exists, pure data parallelism. Ties are broken by fewer pipeline stages, then lower tensor parallelism.
    """
    valid = [s for s in all_strategies(world) if not any(strategy_problems(model, s) for model in models)]
    return min(valid, key=lambda s: (distance(s, requested), s.pp, s.tp))


def distance(one: ParallelStrategy, other: ParallelStrategy) -> Fraction:
    """Return the product over axes of the factors by which the degrees of two strategies differ."""
    pairs = ((one.dp, other.dp), (one.tp, other.tp), (one.pp, other.pp))
    return math.prod((Fraction(max(pair), min(pair)) for pair in pairs), start=Fraction(1))
