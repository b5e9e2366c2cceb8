"""Static checks of a plan against the models: which layouts are legal, and the nearest one where one is not."""

from collections.abc import Mapping

from realhf.api.graph import Graph
from realhf.api.layout import ParallelStrategy
from realhf.api.model import ModelConfig
from realhf.api.plan import ExecutionPlan


def strategy_problems(config: ModelConfig, strategy: ParallelStrategy) -> list[str]:
    """Say why a model cannot be cut like this, with the nearest legal degree."""
    problems = []
    if not _legal_tp(config, strategy.tp):
        legal = max(t for t in range(1, strategy.tp + 1) if _legal_tp(config, t))
        problems.append(f"{config.n_heads} heads ({config.n_kv_heads} for keys and values) cannot be cut {strategy.tp} "
                        f"ways; the nearest legal degree is t{legal}")  # fmt: skip
    if strategy.pp > config.n_layers:
        problems.append(f"{config.n_layers} layers cannot be cut into {strategy.pp} stages; at most p{config.n_layers}")
    return problems


def _legal_tp(config: ModelConfig, tp: int) -> bool:
    kv, width = config.n_kv_heads, config.expert_intermediate or config.intermediate
    return config.n_heads % tp == 0 and (kv % tp == 0 or tp % kv == 0) and tp <= min(width, config.vocab)


def plan_problems(graph: Graph, plan: ExecutionPlan, models: Mapping[str, ModelConfig]) -> list[str]:
    """Return one line for every call whose layout its model does not allow."""
    return [
        f"{mfc.name}: {plan[mfc.name].layout.strategy}: {problem}"
        for mfc in graph.mfcs
        if mfc.role is not None and mfc.role in models
        for problem in strategy_problems(models[mfc.role], plan[mfc.name].layout.strategy)
    ]
