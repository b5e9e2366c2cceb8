"""Curves in bounded memory keep sums, extremes and the order of steps."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from realhf.apps.view.report.series import MAX_POINTS, Curve, Series
from tests.scaling import examples

VALUE = st.one_of(st.floats(-1e6, 1e6), st.sampled_from([float("nan"), float("inf"), float("-inf")]))


def filled(values: list[float], parts: int = 1) -> Series:
    series, steps = Series(), np.arange(1, len(values) + 1, dtype=np.float64)
    for own_steps, own_values in zip(
        np.array_split(steps, parts), np.array_split(np.array(values, dtype=np.float64), parts), strict=True
    ):
        series.extend(own_steps, own_values)
    return series


@settings(max_examples=examples(100))
@given(st.lists(VALUE, max_size=50), st.integers(1, 7), st.integers(1, 60))
def test_means_and_extremes_are_those_of_the_finite_values(values: list[float], parts: int, n_points: int) -> None:
    series, curve = filled(values, parts), filled(values, parts).curve(n_points)
    finite = [value for value in values if np.isfinite(value)]
    assert series.n == len(finite) and series.n_omitted == len(values) - len(finite) and len(curve) <= n_points
    assert (np.diff(curve.steps) > 0).all()
    if finite:
        assert (series.first, series.last) == (finite[0], finite[-1])
        assert (series.minimum, series.maximum) == (min(finite), max(finite)) == (curve.low.min(), curve.high.max())
        assert (curve.low <= curve.means).all() and (curve.means <= curve.high).all()


@pytest.mark.parametrize("n", [0, 1, MAX_POINTS - 1, MAX_POINTS, MAX_POINTS + 1, 7 * MAX_POINTS + 13])
@pytest.mark.parametrize("parts", [1, 37])
def test_long_curves_are_averaged(n: int, parts: int) -> None:
    series = filled([2.0 * step for step in range(1, n + 1)], parts)
    curve = series.curve()
    assert len(curve) <= MAX_POINTS and (n < MAX_POINTS) == (series.size == 1)
    starts = np.concatenate([[0.0], curve.steps[:-1]])
    assert curve.means == pytest.approx(starts + curve.steps + 1), "the mean of the steps of each point, twice"
    assert curve.is_averaged == (n >= MAX_POINTS) and (not n or curve.steps[-1] == n)


def test_the_points_do_not_depend_on_how_the_values_arrive() -> None:
    values = list(np.random.default_rng(1).normal(size=3 * MAX_POINTS + 5))
    one, many = filled(values).curve(), filled(values, 911).curve()
    assert isinstance(one, Curve)
    for name in ("steps", "means", "low", "high"):
        assert getattr(one, name) == pytest.approx(getattr(many, name), abs=1e-12)
