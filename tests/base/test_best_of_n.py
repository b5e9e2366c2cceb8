"""The unbiased estimator of the best of n, against every subset and every order."""

import math
from itertools import combinations, permutations
from statistics import mean, stdev

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from realhf.base.best_of_n import (
    best_weights,
    curve,
    expected_best,
    grid_of,
    kl_of_best,
    sorted_by_proxy,
)
from tests.scaling import examples

SCORES = st.lists(st.tuples(st.integers(-3, 3), st.floats(-5, 5)), min_size=1, max_size=5)


def over_subsets(proxy: list[float], gold: list[float], n: int, order: tuple[int, ...]) -> tuple[float, float]:
    """Return the mean scores of the best of all subsets of size n; ties are broken by ``order``."""
    best = [max(some, key=lambda i: (proxy[i], order.index(i))) for some in combinations(range(len(proxy)), n)]
    return mean(proxy[i] for i in best), mean(gold[i] for i in best)


@settings(max_examples=examples(40))
@given(SCORES)
def test_expected_best_is_the_mean_over_subsets_and_orders(scores: list[tuple[int, float]]) -> None:
    proxy, gold = [float(p) for p, _ in scores], [g for _, g in scores]
    grid = range(1, len(scores) + 1)
    found = expected_best(proxy, gold, grid)
    for n in grid:
        expected = np.mean([over_subsets(proxy, gold, n, order) for order in permutations(range(len(proxy)))], axis=0)
        assert found[:, n - 1] == pytest.approx(expected, abs=1e-9)


def test_best_of_one_and_best_of_all() -> None:
    proxy, gold = [0.1, 0.9, 0.5], [10.0, 30.0, 20.0]
    found = expected_best(proxy, gold, (1, 2, 3))
    assert found[0] == pytest.approx([0.5, (0.5 + 0.9 + 0.9) / 3, 0.9])
    assert found[1] == pytest.approx([20.0, (20 + 30 + 30) / 3, 30.0])


def test_equal_proxy_scores_average_their_gold_scores() -> None:
    proxies, golds = sorted_by_proxy([1, 0, 1, 2], [4, 9, 8, 7])
    assert proxies.tolist() == [0, 1, 1, 2] and golds.tolist() == [9, 6, 6, 7]


@settings(max_examples=examples(40))
@given(st.integers(1, 60), st.data())
def test_weights_equal_exact_fractions(n_scored: int, data: st.DataObject) -> None:
    n = data.draw(st.integers(1, n_scored))
    weights = best_weights(n, n_scored)
    exact = [math.comb(i - 1, n - 1) / math.comb(n_scored, n) for i in range(1, n_scored + 1)]
    assert weights == pytest.approx(exact, rel=1e-12, abs=1e-300) and weights.sum() == pytest.approx(1.0)


def by_gammas(n: int, n_scored: int) -> np.ndarray:
    log = math.lgamma
    common = log(n) + log(n_scored + 1) - log(n + 1) - log(n_scored - n + 1)
    places = range(n, n_scored + 1)
    return np.array([0.0] * (n - 1) + [math.exp(log(i) - log(i - n + 1) - common) for i in places])


@pytest.mark.parametrize("n", [1, 2, 100, 4096, 12500, 12600])
def test_weights_of_12600_responses(n: int) -> None:
    weights = best_weights(n, 12600)
    assert np.isfinite(weights).all() and weights.min() >= 0 and weights.sum() == pytest.approx(1.0, rel=1e-9)
    assert weights == pytest.approx(by_gammas(n, 12600), rel=1e-6, abs=1e-12)


def test_proxy_score_increases_with_n() -> None:
    random = np.random.default_rng(1)
    proxy = random.normal(size=12600)
    grid = [*(2**k for k in range(13)), 6144, 8192, 12500, 12600]
    scores = expected_best(proxy, -proxy, grid)
    assert np.isfinite(scores).all() and (np.diff(scores[0]) > 0).all() and scores[0, -1] == proxy.max()
    assert scores[1] == pytest.approx(-scores[0])


def test_curve_over_prompts() -> None:
    proxies, golds = [[1.0, 2.0, 3.0, 4.0], [4.0, 0.0, 0.0, 0.0]], [[1.0, 0.0, 0.0, 0.0], [1.0, 0.0, 0.0, 2.0]]
    first, second, last = curve(proxies, golds, (1, 2, 4, 8))
    assert first == {"n": 1, "kl": 0.0, "proxy_score": pytest.approx(1.75), "gold_score": pytest.approx(0.5),
                     "proxy_stderr": pytest.approx(stdev([2.5, 1.0]) / math.sqrt(2)),
                     "gold_stderr": pytest.approx(stdev([0.25, 0.75]) / math.sqrt(2))}  # fmt: skip
    assert second["n"] == 2 and second["gold_score"] == pytest.approx((0 + 1 / 2 + (2 / 3) / 2) / 2)
    assert (last["n"], last["proxy_score"], last["gold_score"]) == (4, 4.0, 0.5)


def test_curve_without_gold_and_for_one_prompt() -> None:
    entries = curve([[3.0, 1.0, 2.0]])
    assert [e["n"] for e in entries] == [1, 2, 3] and entries[0].keys() == {"n", "kl", "proxy_score", "proxy_stderr"}
    assert {e["proxy_stderr"] for e in entries} == {None} and curve([[1.0]], grid=(2,)) == []
    uneven = curve([[1.0, 2.0, 3.0], [1.0, 2.0]], [[0.0, 0.0, 1.0], [0.0, 1.0]])
    assert [e["n"] for e in uneven] == [1, 2] and uneven[1]["gold_score"] == pytest.approx((2 / 3 + 1) / 2)


def pass_at_k(n: int, n_right: int, k: int) -> float:
    """Return 1 - C(n-c,k) / C(n,k) (Chen et al. 2021, arXiv 2107.03374, sec. 2.1)."""
    return 1.0 - math.prod((n - n_right - i) / (n - i) for i in range(k))


@settings(max_examples=examples(40))
@given(st.integers(1, 30), st.data())
def test_best_of_k_by_the_verdict_is_pass_at_k(n: int, data: st.DataObject) -> None:
    n_right, k = data.draw(st.integers(0, n)), data.draw(st.integers(1, n))
    right = np.arange(n) < n_right
    assert expected_best(right, right, [k])[1, 0] == pytest.approx(pass_at_k(n, n_right, k), abs=1e-12)
    assert pass_at_k(n, n_right, k) == pytest.approx(1 - math.comb(n - n_right, k) / math.comb(n, k), abs=1e-12)


def test_kl_and_grid() -> None:
    assert kl_of_best(1) == 0.0 and kl_of_best(2) == pytest.approx(math.log(2) - 0.5)
    assert kl_of_best(12500) == pytest.approx(8.433564, abs=1e-6)
    assert grid_of(1) == [1] and grid_of(2) == [1, 2] and grid_of(12) == [1, 2, 4, 8, 12]


def test_invalid_arguments() -> None:
    for n in (0, 4):
        with pytest.raises(
            ValueError, match=f"best of n={n}: n must be between 1 and the number of scored responses, 3"
        ):
            best_weights(n, 3)
    with pytest.raises(ValueError, match="best of n=0: n must be positive"):
        curve([[1.0, 2.0]], grid=(0, 1))
    with pytest.raises(ValueError, match="the proxy score of response 1 is nan"):
        curve([[1.0, math.nan]])
    with pytest.raises(ValueError, match="the gold score of response 0 is inf"):
        curve([[1.0, 2.0]], [[math.inf, 0.0]])
    for none in ([], [[1.0], []]):
        with pytest.raises(ValueError, match="best of n needs at least one prompt"):
            curve(none)
