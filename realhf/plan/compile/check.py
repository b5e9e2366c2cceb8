"""Checks of graphs and parallel strategies, and the valid meshes and strategies of a call on a homogeneous cluster."""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction

from realhf.api.graph import MFC, Graph, Sync
from realhf.api.layout import DeviceMesh, Layout, ParallelStrategy, expert_degrees
from realhf.api.model_config import ModelConfig
from realhf.arch.param_specs import param_specs
from realhf.arch.quantization import shard_problems
from realhf.base.errors import did_you_mean

MAX_STAGES = 16  # deeper pipelines are dominated by bubbles at the batch sizes of reinforcement learning
MAX_UNITS_ALL_MESHES = 6


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


def model_problems(mfcs: Sequence[MFC], roles: Collection[str], averages: Sequence[str] = ()) -> list[str]:
    """Return an error for every MFC or moving average whose role is not among ``roles``, which have a model."""
    known = ", ".join(roles) or "none"
    return [
        f"MFC {m.name}: role '{m.role}' has no model (roles with one: {known}){did_you_mean(m.role, roles)}"
        for m in mfcs
        if m.role is not None and m.role not in roles
    ] + [
        f"moving average '{role}' has no model (roles with one: {known}){did_you_mean(role, roles)}"
        for role in averages
        if role not in roles
    ]


def sync_problems(syncs: Sequence[Sync], models: Mapping[str, ModelConfig]) -> list[str]:
    """Return an error for every moving average of a model whose parameters are not those of its target."""
    problems = []
    for sync in syncs:
        source, target = (models.get(role) for role in (sync.source, sync.target))
        if source is None or target is None:
            continue
        ours, theirs = ({spec.name: list(spec.shape) for spec in param_specs(model)} for model in (source, target))
        name = next((name for name in ours | theirs if ours.get(name) != theirs.get(name)), "")
        if name:
            reason = f"{name} has the shapes {ours.get(name, 'none')} and {theirs.get(name, 'none')}"
        elif source.family != target.family:
            reason = f"they are {source.family} and {target.family} models"
        elif target.lora is not None and target.lora.rank and not (source.lora and source.lora.rank):
            reason = f"{sync.target}.lora.rank={target.lora.rank} freezes the weights"
        else:
            continue
        problems.append(f"{sync.target} is an average of {sync.source}: both need the same parameters, but {reason}")
    return problems


def graph_notes(graph: Graph, roles: Collection[str], logged: Collection[str]) -> list[str]:
    """Return notes on unused outputs and models. ``logged`` are keys that every run logs."""
    wanted = {*logged, *(key for m in graph.mfcs for key in m.inputs)}
    unread = {m.name: [key for key in m.outputs if key not in wanted] for m in graph.mfcs}
    notes = [f"no MFC reads {', '.join(keys)} of {name}" for name, keys in unread.items() if keys]
    return notes + [f"no MFC uses the model of role '{role}'" for role in roles if role not in graph.roles]


def divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def all_strategies(world: int) -> list[ParallelStrategy]:
    """Return the strategies for ``world`` workers, by tensor, then pipeline parallelism."""
    return [ParallelStrategy(world // tp // pp, tp, pp) for tp in divisors(world) for pp in divisors(world // tp)]


def strategy_problems(config: ModelConfig, strategy: ParallelStrategy) -> list[str]:
    """Return the reasons why a model cannot be sharded with a strategy."""
    tp, kv, ep, count = strategy.cuts.tp, config.n_kv_heads, strategy.ep, config.n_experts
    of_expert = config.expert_intermediate * (tp // strategy.cuts.expert_tp)  # others have other experts
    smallest_dim = min(width for width in (config.vocab, config.intermediate, of_expert) if width)
    problems = []
    if config.n_heads % tp or (kv % tp and tp % kv):  # a rank has whole groups of heads or a part of one group
        problems.append(f"{config.n_heads} heads ({kv} KV heads) are not divisible by tensor-parallel size {tp}")
    elif tp > smallest_dim:
        problems.append(f"a dimension of {smallest_dim} is smaller than tensor-parallel size {tp}")
    if config.delta_layers and config.delta is not None and config.delta.key_heads % tp:
        problems.append(f"{config.delta.key_heads} linear key heads are not divisible by tensor-parallel size {tp}")
    if config.delta_layers and strategy.context:
        problems.append("its linear attention needs whole rows on a rank, which c divides")
    if strategy.pp * strategy.vpp > config.n_layers:
        chunks = f" of {strategy.vpp} chunks" if strategy.vpp > 1 else ""
        problems.append(f"{config.n_layers} layers are fewer than {strategy.pp} pipeline stages{chunks}")
    if ep > max(count, 1):
        problems.append(f"{count} experts are fewer than expert-parallel size {ep}" if count else "it has no experts")
    return problems or [*shard_problems(config, tp)]


def nearest_strategy(requested: ParallelStrategy, world: int, models: Collection[ModelConfig]) -> ParallelStrategy:
    """Return the nearest strategy on ``world`` workers valid for all models; pure data parallelism always is."""
    some = all_strategies(world)
    some += [replace(s, context=True) for s in some if requested.context and s.tp > 1]
    some += [replace(s, ep=ep) for s in some for ep in expert_degrees(s.dp, s.tp)
             if not s.context and 1 < ep <= requested.ep]  # fmt: skip
    n_chunks = min(requested.vpp, max((model.n_layers for model in models), default=1))
    some += [replace(s, vpp=vpp) for s in some for vpp in range(2, n_chunks + 1) if s.pp > 1]
    valid = [s for s in some if not any(strategy_problems(model, s) for model in models)]
    return min(valid, key=lambda s: (distance(s, requested), s.pp, s.tp))


def distance(one: ParallelStrategy, other: ParallelStrategy) -> Fraction:
    """Return the product over axes of the factors by which the degrees of two strategies differ."""
    shares = ((some.weight_tp, some.tp // some.weight_tp) for some in (one, other))
    degrees = ((some.dp, some.pp, some.ep, some.vpp) for some in (one, other))
    pairs = (*zip(*degrees, strict=True), *zip(*shares, strict=True))
    return math.prod((Fraction(max(pair), min(pair)) for pair in pairs), start=Fraction(1))


def contiguous_mesh(size: int, first: int = 0) -> DeviceMesh:
    return DeviceMesh(tuple(range(first, first + size)))


def meshes(n_workers: int, node_size: int) -> list[DeviceMesh]:
    """Return meshes of contiguous workers.

    A unit is a node, or a worker if there is one node. With up to six units, these are all contiguous ranges of units.
    The following fractions of the cluster are included if they consist of whole nodes or divide a node: all of it, the
    first and last three quarters, and every half, quarter and eighth.
    """
    n_nodes = n_workers // node_size
    unit = node_size if n_nodes > 1 else 1
    if n_workers // unit <= MAX_UNITS_ALL_MESHES:
        runs = [(a, b) for a in range(0, n_workers, unit) for b in range(a + unit, n_workers + 1, unit)]
    else:
        runs = []
    for share in (Fraction(1), Fraction(3, 4), Fraction(1, 2), Fraction(1, 4), Fraction(1, 8)):
        size = n_workers * share
        if size.denominator == 1 and (size % node_size == 0 or node_size % size == 0):
            starts = range(0, n_workers - int(size) + 1, int(size if share.numerator == 1 else n_workers * (1 - share)))
            runs += [(start, start + int(size)) for start in starts]
    return [contiguous_mesh(b - a, a) for a, b in dict.fromkeys(runs)]


def strategies(size: int, node_size: int, config: ModelConfig | None) -> Iterator[ParallelStrategy]:
    """Yield the strategies on ``size`` workers, with tensor parallelism inside a node; without a model, only ``dp``."""
    if config is None:
        yield ParallelStrategy(dp=size)
        return
    for strategy in all_strategies(size):
        fits_node = strategy.tp <= node_size and (size < node_size or node_size % strategy.tp == 0)
        if fits_node and strategy.pp <= MAX_STAGES and not strategy_problems(config, strategy):
            yield strategy


def layouts(n_workers: int, node_size: int, config: ModelConfig | None) -> list[Layout]:
    """Return all layouts that a search considers for a model."""
    return [
        Layout(mesh, strategy)
        for mesh in meshes(n_workers, node_size)
        for strategy in strategies(len(mesh.ranks), node_size, config)
    ]
