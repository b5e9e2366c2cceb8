"""What can be said of a graph and of layouts before anything runs; the nearest legal layout where one is not."""

import math
from collections.abc import Collection, Sequence
from fractions import Fraction

from realhf.api.graph import MFC
from realhf.api.layout import ParallelStrategy
from realhf.api.model_config import ModelConfig
from realhf.base.errors import did_you_mean


def key_problems(mfcs: Sequence[MFC], given: Collection[str], data: str) -> list[str]:
    """Name the keys that MFCs read, and that neither an MFC makes nor the data set, which is called ``data``, has."""
    made = {key for m in mfcs for key in m.outputs}
    readers: dict[str, list[str]] = {}
    for m in mfcs:
        for key in sorted({*m.inputs} - made - {*given}):
            readers.setdefault(key, []).append(m.name)
    return [
        f"{' and '.join(names)} {'needs' if len(names) == 1 else 'need'} '{key}': no MFC makes it, and {data} has only "
        f"{', '.join(sorted(given))}{did_you_mean(key, sorted(made | {*given}))}"
        for key, names in readers.items()
    ]


def model_problems(mfcs: Sequence[MFC], roles: Collection[str]) -> list[str]:
    """Name the roles of MFCs that have no model; ``roles`` are those that have one."""
    known = ", ".join(roles) or "none"
    return [
        f"MFC {m.name}: role '{m.role}' has no model (roles with one: {known}){did_you_mean(m.role, roles)}"
        for m in mfcs
        if m.role is not None and m.role not in roles
    ]


def graph_notes(mfcs: Sequence[MFC], roles: Collection[str], shown: Collection[str]) -> list[str]:
    """Say what is made or loaded for nobody. ``shown`` are keys that every run writes down."""
    wanted = {*shown, *(key for m in mfcs for key in m.inputs)}
    unread = {m.name: [key for key in m.outputs if key not in wanted] for m in mfcs}
    notes = [f"nobody reads {', '.join(keys)} of {name}" for name, keys in unread.items() if keys]
    used = {m.role for m in mfcs}
    return notes + [f"no MFC uses the model of role '{role}'" for role in roles if role not in used]


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
