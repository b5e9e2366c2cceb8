"""Charts of made-up timelines, checked by the coordinates of their elements."""

import xml.etree.ElementTree as ET
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from realhf.api.program import Compute, Instruction, Transfer
from realhf.apps.view.timeline_svg import (
    COLOURS,
    LEFT,
    RIGHT,
    WIDTH,
    lanes_of,
    ranks_text,
    stack_svgs,
    ticks,
    timeline_svg,
)
from realhf.plan.search.timeline import Activity, Timeline
from tests.plan.search.planners import layout
from tests.scaling import examples

SVG = "{http://www.w3.org/2000/svg}"
HERE = layout("d1")


def compute(mfc: str) -> Instruction:
    return Compute(mfc, "actor", HERE)


GEN, MOVE, TRAIN = compute("gen"), Transfer(("tokens",), HERE), compute("train")


def activity(what: Instruction, ranks: tuple[int, ...], start: float, end: float, after: int | None) -> Activity:
    mfc = what.mfc if isinstance(what, Compute) else "train"
    return Activity(mfc, int(start >= 10), what, ranks, start, end, after)


TIMELINE = Timeline(
    4,
    (
        activity(GEN, (0, 1, 2, 3), 0, 4, None),
        activity(TRAIN, (0, 1), 4, 10, 0),
        activity(GEN, (0, 1, 2, 3), 10, 14, 1),
        activity(MOVE, (0, 1, 2), 14, 14.0001, 2),
        activity(MOVE, (0, 1), 14.0001, 15, 3),
        activity(TRAIN, (0, 1), 15, 20, 4),
    ),
    (10.0, 20.0),
)


def drawn(
    timeline: Timeline = TIMELINE, names: tuple[str, ...] = ("gen", "train"), until: float | None = None
) -> ET.Element:
    return ET.fromstring(timeline_svg(timeline, names, "a < b & c", until))


def bars(root: ET.Element) -> list[tuple[str, dict[str, str]]]:
    return [(rect[0].text or "", rect.attrib) for rect in root.iter(f"{SVG}rect") if len(rect)]


def span(box: dict[str, str]) -> tuple[float, float]:
    """Start and end of a bar in seconds of the settled step, for an axis of ten seconds."""
    x, width = float(box["x"]), float(box["width"])
    return round((x - LEFT) / WIDTH * 10, 2), round((x + width - LEFT) / WIDTH * 10, 2)


def test_the_settled_steps_are_drawn_to_scale() -> None:
    spans = [(title.split(",")[0], span(box), box["fill"]) for title, box in bars(drawn())]
    assert spans == [
        ("gen Compute", (0, 4), COLOURS[0]),
        ("train Transfer", (4, 5), COLOURS[1]),
        ("train Compute", (5, 10), COLOURS[1]),
        ("gen Compute", (0, 4), COLOURS[0]),
    ]


def test_workers_with_equal_activities_share_a_lane_regardless_of_short_transfers() -> None:
    assert lanes_of(TIMELINE) == [((0, 1), [2, 3, 4, 5]), ((2,), [2, 3]), ((3,), [2])]
    assert lanes_of(TIMELINE, 0.001) == [((0, 1), [2, 4, 5]), ((2, 3), [2])]
    words = [text.text for text in drawn().iter(f"{SVG}text")]
    assert "0-1" in words and "2-3" in words


def test_the_critical_path_is_outlined_and_transfers_are_thin() -> None:
    boxes = dict(bars(drawn()))
    moving = next(box for title, box in boxes.items() if "Transfer" in title)
    training = next(box for title, box in boxes.items() if "train Compute" in title)
    assert float(moving["height"]) < float(training["height"]) and "stroke" in training
    beside = replace(TIMELINE, activities=(*TIMELINE.activities, activity(TRAIN, (3,), 14, 15, 2)))
    (aside,) = [box for title, box in bars(drawn(beside)) if "1 s" in title and "critical" not in title]
    assert "stroke" not in aside


def test_compared_charts_have_a_common_axis() -> None:
    root = drawn(until=20.0)
    assert max(span(box)[1] for _, box in bars(root)) == 5.0
    labels = [text.text or "" for text in root.iter(f"{SVG}text") if (text.text or "").endswith(" s")]
    assert labels[0] == "0 s" and labels[-1] == "20 s"


def test_steps_after_the_settled_ones_are_omitted() -> None:
    late = replace(TIMELINE, step_ends=(5.0, 15.0, 20.0), max_staleness=1)
    assert late.steady_state == (5.0, 15.0)
    assert max(span(box)[1] for _, box in bars(drawn(late))) == 10.0


@settings(max_examples=examples(60))
@given(st.lists(st.text(st.sampled_from("abc_<&"), min_size=1, max_size=60), min_size=1, max_size=25, unique=True))
def test_all_elements_are_inside_the_chart_and_do_not_overlap(names: list[str]) -> None:
    timeline = replace(TIMELINE, activities=tuple(replace(a, mfc=names[0]) for a in TIMELINE.activities))
    root = drawn(timeline, tuple(names))
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    assert width == LEFT + WIDTH + RIGHT
    for rect in root.iter(f"{SVG}rect"):
        x, y, w, h = (float(rect.attrib[key]) for key in ("x", "y", "width", "height"))
        assert x >= 0 and y >= 0 and x + w <= width + 0.01 and y + h <= height
    keys = [t for t in root.iter(f"{SVG}text") if t.text in names and "text-anchor" not in t.attrib]
    assert [t.text for t in keys][-len(names) :] == names
    places = [(float(t.attrib["y"]), float(t.attrib["x"]), len(t.text or "")) for t in keys]
    assert places == sorted(places)
    for (y, x, n), (next_y, next_x, _) in zip(places, places[1:], strict=False):
        assert next_y > y or next_x >= x + 6 * n
    lanes = [float(rect.attrib["y"]) for rect in root.iter(f"{SVG}rect") if rect.attrib["fill"] == "#eee"]
    assert max(y for y, _, _ in places) < min(lanes)


@pytest.mark.parametrize(
    ("until", "expected"),
    [(10, [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10]), (0.5, [0, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.45, 0.5]),
     (13.33, [0, 2, 4, 6, 8, 10, 12])],
)  # fmt: skip
def test_ticks(until: float, expected: list[float]) -> None:
    assert ticks(until) == pytest.approx(expected)


@settings(max_examples=examples(200))
@given(st.floats(1e-6, 1e6))
def test_ticks_are_few_and_cover_the_axis(until: float) -> None:
    values = ticks(until)
    assert 5 <= len(values) <= 11 and values[0] == 0 and values[-1] <= until * (1 + 1e-6)
    assert until - values[-1] < values[1] * (1 + 1e-6)


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [((0,), "0"), ((0, 1, 2), "0-2"), ((0, 2, 3, 7), "0,2-3,7"), (tuple(range(0, 40, 2)), "0,2,4,6,8,1...")],
)
def test_ranks_as_ranges(ranks: tuple[int, ...], expected: str) -> None:
    assert ranks_text(ranks) == expected


def test_stacked_charts() -> None:
    one, two = (timeline_svg(TIMELINE, ("gen", "train"), title) for title in ("one", "two"))
    assert stack_svgs([one]) == one
    root = ET.fromstring(stack_svgs([one, two]))
    assert [svg.attrib["y"] for svg in root] == ["0", ET.fromstring(one).attrib["height"]]
    assert float(root.attrib["height"]) == 2 * float(ET.fromstring(one).attrib["height"])
