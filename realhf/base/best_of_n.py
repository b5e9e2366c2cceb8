"""Unbiased estimates of the score of the best of n responses, from N scored ones."""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]
Entry = dict[str, float | None]


def best_weights(n: int, n_scored: int) -> Floats:
    """Return the probability of each response, from worst to best, to be the best of n: ``[N]``.

    ``w_i = C(i-1, n-1) / C(N, n)`` by the recurrence ``w_N = n/N, w_(i-1) = w_i (i-n) / (i-1)``, which cannot
    overflow. ValueError unless ``1 <= n <= n_scored``. (Coste et al. 2024, arXiv 2310.02743; Nakano et al. 2021.)
    """
    if not 1 <= n <= n_scored:
        raise ValueError(f"best of n={n}: n must be between 1 and the number of scored responses, {n_scored}")
    places = np.arange(n_scored, 1, -1, dtype=np.float64)
    factors = np.maximum(places - n, 0.0) / (places - 1)
    return np.cumprod([n / n_scored, *factors])[::-1]


def sorted_by_proxy(proxy: ArrayLike, gold: ArrayLike) -> tuple[Floats, Floats]:
    """Return the proxy and gold scores, ``[N]`` each, sorted by proxy score.

    Responses with equal proxy scores each get the mean of their gold scores, which is the expectation over all orders.
    ValueError for scores that are not finite.
    """
    proxies, golds = np.asarray(proxy, np.float64), np.asarray(gold, np.float64)
    if proxies.ndim != 1 or proxies.shape != golds.shape:
        raise ValueError(f"scores have shapes {proxies.shape} and {golds.shape}, must be equal and 1-D")
    for name, scores in (("proxy", proxies), ("gold", golds)):
        if len(invalid := np.flatnonzero(~np.isfinite(scores))):
            raise ValueError(f"the {name} score of response {invalid[0]} is {scores[invalid[0]]}")
    order = np.argsort(proxies, kind="stable")
    proxies, golds = proxies[order], golds[order]
    starts = np.flatnonzero(np.diff(proxies, prepend=-np.inf))
    sizes = np.diff(starts, append=len(proxies))
    return proxies, np.repeat(np.add.reduceat(golds, starts) / sizes, sizes) if len(golds) else golds


def expected_best(proxy: ArrayLike, gold: ArrayLike, grid: Sequence[int]) -> Floats:
    """Return the expected proxy and gold scores of the best of n by proxy score: ``[2, len(grid)]``."""
    scores = np.stack(sorted_by_proxy(proxy, gold))
    return np.stack([scores @ best_weights(n, scores.shape[1]) for n in grid], axis=1)


def curve(
    proxies: Sequence[ArrayLike], golds: Sequence[ArrayLike] | None = None, grid: Sequence[int] = ()
) -> list[Entry]:
    """Return the scores of the best of n, with an entry for each n in ``grid`` (default: ``grid_of``).

    ``proxies[p]`` and ``golds[p]`` are the scores of the responses to prompt p. An entry has ``n``, ``kl``, and means
    over prompts ``proxy_score`` and ``gold_score`` with standard errors (None for one prompt). Any n larger than the
    smallest number of responses is skipped. ValueError for n < 1, or without responses.
    """
    n_scored = min((len(np.asarray(scores)) for scores in proxies), default=0)
    if not n_scored:
        raise ValueError("best of n needs at least one prompt, and a response to each prompt")
    ns = [n for n in grid or grid_of(n_scored) if n <= n_scored]
    entries: list[Entry] = [{"n": n, "kl": kl_of_best(n)} for n in ns]
    if not ns:
        return entries
    pairs = zip(proxies, proxies if golds is None else golds, strict=True)
    scores = np.stack([expected_best(proxy, gold, ns) for proxy, gold in pairs])  # [prompts, 2, n]
    means = scores.mean(axis=0)
    errors = scores.std(axis=0, ddof=1) / math.sqrt(len(scores)) if len(scores) > 1 else None
    for row, kind in enumerate(("proxy", "gold") if golds is not None else ("proxy",)):
        for i, entry in enumerate(entries):
            entry[f"{kind}_score"] = float(means[row, i])
            entry[f"{kind}_stderr"] = None if errors is None else float(errors[row, i])
    return entries


def grid_of(n_scored: int) -> list[int]:
    """Return the powers of two below ``n_scored``, and ``n_scored``."""
    return [*(n for k in range(n_scored.bit_length()) if (n := 2**k) < n_scored), n_scored]


def kl_of_best(n: int) -> float:
    """Return ``log n - (n-1)/n``, the KL divergence of best of n from the policy, in nats.

    Exact without ties, else an upper bound (Beirami et al. 2024, arXiv 2401.01879). ValueError for n < 1.
    """
    if n < 1:
        raise ValueError(f"best of n={n}: n must be positive")
    return math.log(n) - (n - 1) / n
