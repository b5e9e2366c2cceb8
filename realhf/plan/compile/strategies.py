"""Enumerates the valid and useful meshes and strategies of a call on a homogeneous cluster."""

from collections.abc import Iterator
from fractions import Fraction

from realhf.api.layout import DeviceMesh, Layout, ParallelStrategy
from realhf.api.model_config import ModelConfig
from realhf.plan.compile.check import all_strategies, strategy_problems

MAX_STAGES = 16
"""Deeper pipelines are dominated by bubbles at the batch sizes of reinforcement learning."""
MAX_UNITS_ALL_MESHES = 6


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
    """Yield the strategies for a model on ``size`` workers, with tensor parallelism inside a node.

    Without a model, the only strategy is data parallelism.
    """
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
