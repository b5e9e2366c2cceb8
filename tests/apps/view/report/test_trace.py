"""The last complete step of a trace, also of a long or damaged one."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from realhf.api.program import Compute
from realhf.apps.view.report import trace
from realhf.apps.view.report.trace import CLOCK_S, WorkerSpan, activities_of, last_complete
from tests.plan.search.planners import layout
from tests.scaling import examples

NAMES = {"gen/Compute", "train/Compute"}
INSTRUCTIONS = {name: Compute(name.partition("/")[0], "actor", layout("d1")) for name in NAMES}


def line(name: str, step: int, start: int, duration: int = 10, rank: int = 0) -> str:
    return json.dumps(
        {"name": name, "ph": "X", "tid": 0, "pid": rank, "ts": start, "dur": duration, "args": {"step": step}}
    )


def text(n_steps: int) -> str:
    lines = [
        line(name, step, 100 * step + 20 * i) for step in range(1, n_steps + 1) for i, name in enumerate(sorted(NAMES))
    ]
    return "[\n" + "".join(f"{each},\n" for each in lines)


@pytest.mark.parametrize("tail", [200, 1 << 20])
def test_the_last_complete_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tail: int) -> None:
    monkeypatch.setattr(trace, "FIRST_TAIL", tail)
    path = tmp_path / "trace.json"
    path.write_text(text(20) + line("gen/Compute", 21, 9999) + ",\n" + '{"name": "train/Comp')
    step, spans = last_complete(path, NAMES) or (0, [])
    assert step == 20 and [span.name for span in spans] == sorted(NAMES)
    assert spans[0].end - spans[0].start == pytest.approx(1e-5)


@pytest.mark.parametrize("content", ["", "[\n", "\x00\xff{]", '{"name": "gen/Compute", "ph": "X"}\n', "[" * 9999])
def test_traces_without_a_complete_step(tmp_path: Path, content: str) -> None:
    path = tmp_path / "trace.json"
    path.write_text(content)
    assert last_complete(path, NAMES) is None and last_complete(tmp_path / "none", NAMES) is None


@settings(max_examples=examples(60))
@given(st.lists(st.tuples(st.integers(0, 3), st.floats(0, 10), st.floats(0, 5)), max_size=30))
def test_an_activity_follows_the_last_one_that_ended_before_it(entries: list[tuple[int, float, float]]) -> None:
    spans = [WorkerSpan("gen/Compute", rank, start, start + length) for rank, start, length in entries]
    activities = activities_of(spans, INSTRUCTIONS, step=3)
    assert len(activities) == len(spans) and [a.start for a in activities] == sorted(a.start for a in activities)
    for number, activity in enumerate(activities):
        earlier = [a for a in activities[:number] if a.start < a.end <= activity.start + CLOCK_S]
        assert (activity.after is None) == (not earlier)
        if activity.after is not None:
            assert activity.after < number and activities[activity.after].end == max(a.end for a in earlier)
