"""Pictures of layouts, memory and timelines, by the coordinates of their elements."""

import xml.etree.ElementTree as ET
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from realhf.api.layout import DeviceMesh, Layout, ParallelStrategy
from realhf.apps.view.report.plan_pictures import MAX_LABELLED, PURPOSES, cells, memory_rows
from realhf.apps.view.report.timeline import LOW_LANE, MAX_BARS, timeline_picture
from realhf.plan.cost.memory import Bytes
from realhf.plan.search.timeline import Timeline
from tests.apps.view.test_timeline_svg import MOVE, TIMELINE, TRAIN, activity
from tests.scaling import examples


def percent(text: str) -> float:
    return float(text.rstrip("%"))


def bars(picture: str) -> list[tuple[str, float, float, str]]:
    """Return title, start and end in percent, and classes of the elements with a title."""
    boxes = [rect for rect in ET.fromstring(picture).iter("rect") if len(rect)]
    return [(box[0].text or "", percent(box.attrib["x"]), percent(box.attrib["x"]) + percent(box.attrib["width"]),
             box.attrib["class"]) for box in boxes]  # fmt: skip


def test_workers_of_a_layout_show_their_coordinates() -> None:
    layout = Layout(DeviceMesh((1, 3)), ParallelStrategy(dp=1, tp=2, pp=1))
    root = ET.fromstring(cells(layout, 4, 2))
    assert [rect.attrib["class"] for rect in root.iter("rect")] == ["cell idle", "cell f2", "cell idle", "cell f2"]
    assert [text.text for text in root.iter("text")] == ["d0 t0 p0", "d0 t1 p0"]
    wide = Layout(DeviceMesh(tuple(range(64))), ParallelStrategy(dp=8, tp=4, pp=2))
    found = bars(cells(wide, 64, 0))
    assert len(found) == 64 and found[-1][2] <= 100 and found[-1][0] == "worker 63: data 7, tensor 3, pipeline 1"
    assert MAX_LABELLED < 64 and not list(ET.fromstring(cells(wide, 64, 0)).iter("text"))


def test_every_purpose_has_a_name() -> None:
    assert list(PURPOSES) == list(vars(Bytes()))


@settings(max_examples=examples(60))
@given(st.dictionaries(st.integers(0, 20), st.builds(Bytes, *[st.sampled_from([0.0, 5e8, 3e9])] * 3), min_size=1),
       st.one_of(st.none(), st.floats(1, 1e12)))  # fmt: skip
def test_memory_is_stacked_to_scale(memory: dict[int, Bytes], measured: float | None) -> None:
    rows = memory_rows(memory, measured, 1e13)
    assert len(rows) == len(set(memory.values()))
    largest = max(needed.total for needed in memory.values())
    for row, needed in zip(rows, dict.fromkeys(memory.values()), strict=True):
        found = bars(row.picture)
        assert [part[1] for part in row.parts] == [PURPOSES[name] for name, size in vars(needed).items() if size]
        for (_, _, end, _), (_, start, _, _) in zip(found, found[1:], strict=False):
            assert start == pytest.approx(end, abs=0.01)
        if found:
            assert found[-1][2] / 100 * 1.04 * max(largest, measured or 1.0) == pytest.approx(needed.total, rel=1e-2)
        lines = list(ET.fromstring(row.picture).iter("line"))
        assert len(lines) == (measured is not None), "the usable memory is outside"


def test_the_timeline_is_drawn_to_scale() -> None:
    picture = timeline_picture(TIMELINE, ("gen", "train"), "a < b", 20.0)
    found = [(title.partition(":")[0], start, end) for title, start, end, _ in bars(picture)]
    assert found[:3] == [("gen Compute", 0, 20), ("train Transfer", 20, 25), ("train Compute", 25, 50)]
    assert all("critical" in classes for title, _, _, classes in bars(picture) if "critical path" in title)
    assert ET.fromstring(picture).attrib["aria-label"].startswith("a < b: gen 4 s, train 6 s")


def test_a_call_outside_the_plan_and_a_step_without_length() -> None:
    assert "f0" in bars(timeline_picture(TIMELINE, ("gen",), "t", 20.0))[1][3]
    empty = Timeline(1, (), (0.0,))
    assert bars(timeline_picture(empty, ("gen",), "t", 0.0)) == []


def test_the_longest_activities_of_many_are_drawn() -> None:
    many = tuple(
        activity(MOVE if i % 2 else TRAIN, (i % 64,), i / 64, i / 64 + (i % 7 + 1) / 100, None) for i in range(9000)
    )
    timeline = replace(TIMELINE, n_workers=64, activities=many, step_ends=(150.0,))
    picture = timeline_picture(timeline, ("gen", "train"), "t", 150.0)
    assert 1000 < len(bars(picture)) <= MAX_BARS
    lanes = [rect for rect in ET.fromstring(picture).iter("rect") if rect.attrib["class"] == "idle"]
    assert len(lanes) == 64 and max(float(lane.attrib["y"]) for lane in lanes) == 63 * LOW_LANE
