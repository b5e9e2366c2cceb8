"""The order of the infinite stream of training rows, a pure function of the seed."""

from collections.abc import Sequence

import numpy as np

from realhf.base.seeds import stable_seed


def epoch_order(seed: int, epoch: int, n: int, shuffle: bool) -> np.ndarray:
    """Return the order of rows in an epoch, a permutation of ``range(n)``, int64."""
    if not shuffle:
        return np.arange(n)
    return np.random.default_rng(stable_seed("row order", seed, epoch)).permutation(n)


def rows_at(seed: int, n: int, start: int, stop: int, shuffle: bool) -> list[int]:
    """Return the rows at positions ``start`` to ``stop`` of the stream: position i is row ``order(i // n)[i % n]``."""
    if n < 1 or not 0 <= start <= stop:
        raise ValueError(f"invalid positions {start}:{stop} in a stream over {n} rows")
    rows: list[int] = []
    while start < stop:
        epoch, first = divmod(start, n)
        last = min(n, first + stop - start)
        rows += epoch_order(seed, epoch, n, shuffle)[first:last].tolist()
        start += last - first
    return rows


def resampled_at(seed: int, n: int, step: int, own: Sequence[int], start: int, stop: int) -> list[int]:
    """Return entries ``start`` to ``stop`` of the replacement rows of a step, which exclude its ``own`` rows.

    The other rows are shuffled by (seed, step) and repeated if there are too few.
    """
    order = np.random.default_rng(stable_seed("redraw", seed, step)).permutation(n)
    others = order[~np.isin(order, list(own))]
    candidates = others if len(others) else order
    return candidates[np.arange(start, stop) % len(candidates)].tolist()
