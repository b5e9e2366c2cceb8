"""Combining the scores of several reward models."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from realhf.api.config.preference import EnsembleConfig, Objective
from realhf.ops.ensemble import check_scores, combine, variance

SCORES = np.array([[1.0, 2.0, -1.0], [3.0, 2.0, 0.0], [5.0, 2.0, 4.0]])
MANY = arrays(np.float64, array_shapes(min_dims=2, max_dims=2, min_side=1, max_side=5), elements=st.floats(-9, 9))


def combined(objective: Objective, weight: float = 0.5, unbiased: bool = False) -> list[float]:
    return combine(SCORES, EnsembleConfig(["a", "b", "c"], objective, weight, unbiased)).tolist()


def test_objectives() -> None:
    assert combined(Objective.mean) == [3, 2, 1] and combined(Objective.WCO) == [1, 2, -1]
    assert combined(Objective.UWO) == pytest.approx([3 - 0.5 * 8 / 3, 2, 1 - 0.5 * 14 / 3])
    assert combined(Objective.UWO, unbiased=True) == pytest.approx([3 - 0.5 * 4, 2, 1 - 0.5 * 7])
    assert combined(Objective.UWO, weight=0.0) == combined(Objective.mean)


@given(MANY, st.floats(0, 3), st.booleans())
def test_order_of_objectives_and_invariance_to_member_order(scores: np.ndarray, weight: float, flag: bool) -> None:
    mean, worst, uncertain = (combine(scores, EnsembleConfig([], o, weight, flag)) for o in Objective)
    assert (worst <= mean + 1e-9).all() and (uncertain <= mean + 1e-9).all() and len(mean) == scores.shape[1]
    for objective, found in zip(Objective, (mean, worst, uncertain), strict=True):
        assert combine(scores[::-1], EnsembleConfig([], objective, weight, flag)) == pytest.approx(found)
        assert combine(scores + 1, EnsembleConfig([], objective, weight, flag)) == pytest.approx(found + 1)


@given(MANY, st.sampled_from(Objective), st.booleans())
def test_one_member(scores: np.ndarray, objective: Objective, flag: bool) -> None:
    assert combine(scores[:1], EnsembleConfig([], objective, 2.0, flag)).tolist() == scores[0].tolist()
    assert variance(scores[:1], flag).tolist() == [0.0] * scores.shape[1]


@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
def test_non_finite_score_raises(broken: float) -> None:
    scores = SCORES.copy()
    check_scores(scores, "abc", "xyz")
    scores[1, 2] = broken
    with pytest.raises(ValueError, match=f"reward model 1 \\(b\\) scores z with {broken}"):
        check_scores(scores, "abc", "xyz")
