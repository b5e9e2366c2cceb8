"""Line charts of downsampled curves."""

import math
import re

import pytest

from realhf.apps.view.curves_svg import MAX_POINTS, curves_svg, downsample


def points_of(picture: str) -> list[list[tuple[float, float]]]:
    return [
        [tuple(map(float, pair.split(","))) for pair in line.split()]  # type: ignore[misc]
        for line in re.findall(r'points="([^"]*)"', picture)
    ]


@pytest.mark.parametrize("n", [0, 1, MAX_POINTS, MAX_POINTS + 1, 10 * MAX_POINTS + 7])
def test_many_points_are_averaged(n: int) -> None:
    curve = [(float(step), 2.0 * step) for step in range(n)]
    points = downsample(curve)
    assert len(points) <= MAX_POINTS and (n > MAX_POINTS or points == curve)
    assert all(value == pytest.approx(2 * step) for step, value in points)
    assert not n or sum(step for step, _ in points[:-1]) <= sum(range(n))


def test_nan_and_infinity_are_dropped() -> None:
    assert downsample([(1, math.nan), (2, 3.0), (3, math.inf)]) == [(2, 3.0)]
    assert curves_svg("t", {"a": [(1, math.nan)], "b": []}) == ""


def test_higher_values_are_drawn_higher() -> None:
    picture = curves_svg("a <title>", {"up": [(1, 0.0), (2, 5.0), (3, 10.0)], "flat": [(1, 5.0), (3, 5.0)]})
    up, flat = points_of(picture)
    assert [x for x, _ in up] == sorted(x for x, _ in up) and up[0][0] == flat[0][0] and up[-1][0] == flat[-1][0]
    assert up[0][1] > up[1][1] > up[2][1] and flat[0][1] == flat[1][1] == pytest.approx(up[1][1])
    assert "a &lt;title&gt;" in picture and ">up 10<" in picture and ">flat 5<" in picture


@pytest.mark.parametrize("value", [0.0, 3.0, -1e9, 1e-12])
def test_a_single_value_is_a_dot(value: float) -> None:
    picture = curves_svg("t", {"one": [(4, value)]})
    assert picture.count("<circle") == 1 and "nan" not in picture and "inf" not in picture
