"""Which row stands at which place of the endless stream of training rows: a pure function of the seed."""

import numpy as np

from realhf.base.seeding import stable_seed


def epoch_order(seed: int, epoch: int, n: int, shuffle: bool) -> np.ndarray:
    """Return the rows in the order in which epoch ``epoch`` takes them, a permutation of ``range(n)``, int64."""
    if not shuffle:
        return np.arange(n)
    return np.random.default_rng(stable_seed("row order", seed, epoch)).permutation(n)


def rows_at(seed: int, n: int, start: int, stop: int, shuffle: bool) -> list[int]:
    """Return the rows at positions ``start`` to ``stop`` of the stream: position i is row ``order(i // n)[i % n]``."""
    if n < 1 or not 0 <= start <= stop:
        raise ValueError(f"no positions {start}:{stop} in a stream over {n} rows")
    rows: list[int] = []
    while start < stop:
        epoch, first = divmod(start, n)
        last = min(n, first + stop - start)
        rows += epoch_order(seed, epoch, n, shuffle)[first:last].tolist()
        start += last - first
    return rows
