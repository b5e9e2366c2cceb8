"""Unbiased best-of-n estimates from N scored responses per prompt."""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]
Entry = dict[str, float | None]


def best_weights(n: int, n_scored: int) -> Floats:
    """Return the probability that each response, sorted from worst to best, is the best of n: ``[N]``.

    ``w_i = C(i-1, n-1) / C(N, n)`` by the recurrence ``w_N = n/N, w_(i-1) = w_i (i-n) / (i-1)``, in which no number
    exceeds 1. ValueError unless ``1 <= n <= n_scored``. (Coste et al. 2024, arXiv 2310.02743; Nakano et al. 2021.)
    """
    if not 1 <= n <= n_scored:
        raise ValueError(f"best of n={n}: n must be between 1 and the number of scored responses, {n_scored}")
    positions = np.arange(n_scored, 1, -1, dtype=np.float64)
    factors = np.maximum(positions - n, 0.0) / (positions - 1)
    return np.cumprod([n / n_scored, *factors])[::-1]


def sorted_by_proxy(proxy: ArrayLike, gold: ArrayLike) -> tuple[Floats, Floats]:
    """Return both scores of the responses, ``[N]`` each, in ascending order of the proxy score.

    Responses with equal proxy scores each get the mean of their gold scores, the expectation over all tie-breaking
    orders. ValueError for shapes that differ and for scores that are not finite.
    """
    proxies, golds = np.asarray(proxy, np.float64), np.asarray(gold, np.float64)
    if proxies.ndim != 1 or proxies.shape != golds.shape:
        raise ValueError(f"proxy and gold scores must be vectors of one length, got {proxies.shape} and {golds.shape}")
    for name, scores in (("proxy", proxies), ("gold", golds)):
        if len(broken := np.flatnonzero(~np.isfinite(scores))):
            raise ValueError(f"the {name} score of response {broken[0]} is {scores[broken[0]]}")
    order = np.argsort(proxies, kind="stable")
    proxies, golds = proxies[order], golds[order]
    starts = np.flatnonzero(np.diff(proxies, prepend=-np.inf))
    sizes = np.diff(starts, append=len(proxies))
    return proxies, np.repeat(np.add.reduceat(golds, starts) / sizes, sizes) if len(golds) else golds


def expected_best(proxy: ArrayLike, gold: ArrayLike, grid: Sequence[int]) -> Floats:
    """Return both expected scores of the best of n by proxy score, for each n of ``grid``: ``[2, len(grid)]``."""
    scores = np.stack(sorted_by_proxy(proxy, gold))
    return np.stack([scores @ best_weights(n, scores.shape[1]) for n in grid], axis=1)


def curve(
    proxies: Sequence[ArrayLike], golds: Sequence[ArrayLike] | None = None, grid: Sequence[int] = ()
) -> list[Entry]:
    """Return the expected scores of the best of n, one entry per n of ``grid`` (default: ``grid_of``).

    ``proxies[p]`` and ``golds[p]`` are scores of the responses to prompt p. An entry holds ``n``, ``kl`` and, as means
    over prompts with their standard errors (None for one prompt), ``proxy_score`` and ``gold_score``. Values of n
    above the smallest number of responses are skipped. ValueError for n < 1 and for a prompt without responses.
    """
    fewest = min((len(np.asarray(scores)) for scores in proxies), default=0)
    if not fewest:
        raise ValueError("best of n needs at least one prompt, and a response to every prompt")
    sizes = [n for n in grid or grid_of(fewest) if n <= fewest]
    entries: list[Entry] = [{"n": n, "kl": kl_of_best(n)} for n in sizes]
    if not sizes:
        return entries
    pairs = zip(proxies, proxies if golds is None else golds, strict=True)
    scores = np.stack([expected_best(proxy, gold, sizes) for proxy, gold in pairs])  # [prompts, 2, n]
    means = scores.mean(axis=0)
    errors = scores.std(axis=0, ddof=1) / math.sqrt(len(scores)) if len(scores) > 1 else None
    for side, kind in enumerate(("proxy", "gold") if golds is not None else ("proxy",)):
        for i, entry in enumerate(entries):
            entry[f"{kind}_score"] = float(means[side, i])
            entry[f"{kind}_stderr"] = None if errors is None else float(errors[side, i])
    return entries


def grid_of(n_scored: int) -> list[int]:
    """Return the powers of two below ``n_scored``, and ``n_scored``."""
    return [*(n for k in range(n_scored.bit_length()) if (n := 2**k) < n_scored), n_scored]


def kl_of_best(n: int) -> float:
    """Return ``log n - (n-1)/n``, the KL of best of n from the policy, in nats.

    Exact without ties, otherwise an upper bound (Beirami et al. 2024, arXiv 2401.01879). ValueError for n < 1.
    """
    if n < 1:
        raise ValueError(f"best of n={n}: n must be positive")
    return math.log(n) - (n - 1) / n
