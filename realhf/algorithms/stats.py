"""Statistics as (sum, count): they add over micro-batches, mini-batches and ranks; the master divides once."""

from torch import Tensor

from realhf.api.messages import Stats
from realhf.data.protocols import Loss

Monitors = dict[str, tuple[Tensor | float, Tensor | float]]


def mean_of(x: Tensor, mask: Tensor | None = None) -> tuple[float, float]:
    """Return (sum, count) of ``x``, where ``mask`` is nonzero if there is one, summed in float64."""
    if mask is not None:
        x = x[mask.bool()]
    return float(x.double().sum()), float(x.numel())


def stats_of(loss: Loss) -> Stats:
    """Return the monitors of a loss that is not differentiated, as numbers."""
    return {name: (float(value), float(count)) for name, (value, count) in loss.stats.items()}


def add_stats(total: Stats, more: Stats) -> Stats:
    """Return the statistics of two parts of a batch together."""
    result = dict(total)
    for name, (value, count) in more.items():
        old_value, old_count = result.get(name, (0.0, 0.0))
        result[name] = (old_value + value, old_count + count)
    return result
