"""Statistics as (sum, count), which are added over micro-batches, mini-batches and ranks before the division."""

from torch import Tensor

from realhf.api.messages import Stats
from realhf.data.protocols import Loss

Monitors = dict[str, tuple[Tensor | float, Tensor | float]]


def mean_of(x: Tensor, mask: Tensor | None = None) -> tuple[float, float]:
    """Return (sum in float64, count) of ``x``, or of its elements where ``mask`` is nonzero."""
    if mask is not None:
        x = x[mask.bool()]
    return float(x.double().sum()), float(x.numel())


def stats_of(loss: Loss) -> Stats:
    return {name: (float(value), float(count)) for name, (value, count) in loss.stats.items()}


def add_stats(total: Stats, more: Stats) -> Stats:
    result = dict(total)
    for name, (value, count) in more.items():
        old_value, old_count = result.get(name, (0.0, 0.0))
        result[name] = (old_value + value, old_count + count)
    return result
