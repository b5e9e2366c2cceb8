"""Which charts there are, and their pictures, by the coordinates of their elements."""

import re
import xml.etree.ElementTree as ET

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from realhf.apps.view.report.charts import Chart, ChartLine, chart_svg, charts_of, frame_of, info, nice_ticks, spark_svg
from realhf.apps.view.report.series import Curve, Series
from tests.scaling import examples


def curve(*values: float, first: int = 1) -> Curve:
    series = Series()
    series.extend(np.arange(first, first + len(values), dtype=np.float64), np.array(values, dtype=np.float64))
    return series.curve()


def chart(*lines: ChartLine) -> Chart:
    return Chart("c", "s", "a <title>", "", "", lines)


ONE = chart(ChartLine("loss", 0, 'loss "<&>"', 0, 0))


def points(root: ET.Element) -> list[list[tuple[float, float]]]:
    lines = (line.attrib["points"].split() for line in root.iter("polyline"))
    return [[(float(x), float(y)) for x, y in (point.split(",") for point in line)] for line in lines]


def test_metrics_of_one_run_share_charts() -> None:
    charts = charts_of([("run", ["loss", "eval/loss", "time/step_s", "limit/step_s", "actor_train/unknown"])])
    assert [[line.key for line in c.lines] for c in charts] == [["loss", "eval/loss"], ["time/step_s", "limit/step_s"]]
    assert [line.colour for line in charts[0].lines] == [0, 1] and charts[0].lines[1].label == "Held-out loss"
    assert charts[1].unit == "s" and len({c.id for c in charts}) == 2


def test_runs_have_colours_and_further_metrics_have_dashes() -> None:
    charts = charts_of([("a", ["loss", "eval/loss"]), ("b", ["loss"]), ("c", [])])
    lines = [(line.key, line.run, line.label, line.colour, line.dash) for line in charts[0].lines]
    assert lines == [("loss", 0, "a", 0, 0), ("loss", 1, "b", 1, 0), ("eval/loss", 0, "a: Held-out loss", 0, 1)]


def test_names_that_two_calls_share_contain_the_call() -> None:
    (chart,) = charts_of([("run", ["actor_train/grad_norm", "critic_train/grad_norm"])])
    assert [line.label for line in chart.lines] == ["Gradient norm (actor_train)", "Gradient norm (critic_train)"]


def test_names_and_meanings() -> None:
    assert info("reward/mean").text == info("rew_inf/reward").text != "" and info("reward/mean").name == "Reward"
    assert info("my/own metric") == ("my/own metric", "", "")


def test_higher_values_are_drawn_higher() -> None:
    two = chart(ChartLine("up", 0, "up", 0, 0), ChartLine("flat", 0, "flat", 1, 0))
    root = ET.fromstring(chart_svg(two, {(0, "up"): curve(0, 5, 10), (0, "flat"): curve(5, 5, 5)}))
    up, flat = points(root)
    assert [x for x, _ in up] == [0, 500, 1000] and up[0][1] > up[1][1] > up[2][1]
    assert {y for _, y in flat} == {up[1][1]} and root.attrib["aria-label"] == "a <title>, last values: up 10, flat 5"


@pytest.mark.parametrize("value", [0.0, 3.0, -1e9, 1e-12, 1e300])
def test_a_single_value_is_a_dot(value: float) -> None:
    picture = chart_svg(ONE, {(0, "loss"): curve(value)})
    (dot,) = ET.fromstring(picture).iter("circle")
    assert dot.attrib["cx"] == "0.00%" and dot.attrib["cy"] == "50.00%" and "nan" not in picture


def test_curves_without_points_have_no_picture() -> None:
    assert chart_svg(ONE, {(0, "loss"): curve(float("nan"))}) == "" == spark_svg(curve(1.0))


@settings(max_examples=examples(100))
@given(st.lists(st.floats(-1e300, 1e300), min_size=1, max_size=30))
def test_all_points_are_inside_the_chart(values: list[float]) -> None:
    root = ET.fromstring(chart_svg(ONE, {(0, "loss"): curve(*values)}))
    assert all(0 <= x <= 1000 and 0 <= y <= 1000 for x, y in points(root)[0])
    heights = [float(text.attrib["y"].rstrip("%")) for text in root.iter("text")]
    assert all(0 <= y <= 100 for y in heights) and "nan" not in re.sub(
        'aria-label="[^"]*"', "", ET.tostring(root, "unicode")
    )


@settings(max_examples=examples(200))
@given(st.floats(-1e12, 1e12), st.floats(1e-9, 1e12))
def test_ticks_are_few_round_and_between_the_bounds(low: float, span: float) -> None:
    high = low + span
    ticks = nice_ticks(low, high)
    assert len(ticks) <= 10 and ticks == sorted(ticks) and all(low <= tick <= high for tick in ticks)
    assert span < 1e-6 * abs(low) or len(ticks) >= 2


def test_the_axes_contain_all_curves() -> None:
    frame = frame_of([curve(1, 2), curve(-3, first=10)])
    assert frame and (frame.first, frame.last) == (1, 10) and frame.low < -3 and frame.high > 2
    assert frame_of([]) is None
