"""The best models of a run: which they are, what stays of the former ones, and what a killed run leaves."""

import json
from pathlib import Path

import pytest

from realhf.system.checkpoint.best_models import POINTER, TMP_SUFFIX, Best, Record, needed, read_records, rewind_best


def commit(best: Best, step: int, value: float, checkpoints: list[int]) -> None:
    record = best.record(step, {best.metric: value})
    assert record is not None
    write(best.aside(record))
    best.commit(record, checkpoints)


def write(folder: Path) -> None:
    (folder / "actor").mkdir(parents=True)
    (folder / "actor" / "weights").write_text(folder.name)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize(
    ("option", "values", "steps"),
    [
        ("eval/accuracy", [0.2, 0.2, 0.5, 0.4, float("nan"), 0.6], [0, 2, 5]),
        ("-eval/loss", [2.0, float("nan"), 2.0, 1.0, 3.0], [0, 3]),
        ("eval/accuracy", [float("nan"), -1.0], [1]),
    ],
)
def test_what_is_a_record(option: str, values: list[float], steps: list[int], tmp_path: Path) -> None:
    best = Best(tmp_path, option)
    found = [best.record(step, {best.metric: value}) for step, value in enumerate(values)]
    assert [record.step for record in found if record] == steps == [record.step for record in best.records]


def test_where_none_is_asked_for_none_is_kept(tmp_path: Path) -> None:
    assert Best(tmp_path, "").record(1, {"eval/accuracy": 1.0}) is None
    Best(tmp_path / "nowhere", "").prune([1, 2])


def test_what_checkpoints_need() -> None:
    records = [Record(0, 0.1), Record(3, 0.2), Record(8, 0.3), Record(9, 0.4)]
    assert needed(records, []) == {9} and needed(records, [3, 4, 7]) == {3, 9} and needed(records, [2, 8]) == {0, 8, 9}
    assert needed([], [1]) == set() and needed([Record(5, 1.0)], [2]) == {5}


def test_former_ones_stay_as_long_as_a_checkpoint_needs_them(tmp_path: Path) -> None:
    best = Best(tmp_path, "a")
    commit(best, 0, 0.1, [])
    commit(best, 3, 0.2, [2])
    assert names(tmp_path) == [POINTER, "step_0", "step_3"]
    commit(best, 5, 0.3, [2, 4])
    best.prune([4, 6])
    assert names(tmp_path) == [POINTER, "step_3", "step_5"]
    best.prune([6, 8])
    assert names(tmp_path) == [POINTER, "step_5"]
    stored = json.loads((tmp_path / POINTER).read_text())
    assert (stored["metric"], stored["step"], stored["value"], stored["folder"]) == ("a", 5, 0.3, "step_5")
    assert (tmp_path / stored["folder"] / "actor" / "weights").read_text() == f"step_5{TMP_SUFFIX}"


def test_a_run_that_goes_on_takes_back_what_came_later(tmp_path: Path) -> None:
    best = Best(tmp_path, "a")
    for step, value in ((0, 0.1), (3, 0.2), (5, 0.3)):
        commit(best, step, value, [4])
    write(tmp_path / f"step_6{TMP_SUFFIX}")  # killed while it was written
    write(tmp_path / "step_7")  # killed before it was pointed at
    rewind_best(tmp_path, 4)
    assert names(tmp_path) == [POINTER, "step_3"] and read_records(tmp_path, "a") == best.records[:2]
    again = Best(tmp_path, "a")
    assert again.record(4, {"a": 0.15}) is None
    commit(again, 5, 0.3, [4])
    assert again.records == best.records and names(tmp_path) == [POINTER, "step_3", "step_5"]
    assert Best(tmp_path, "b").records == []  # another metric begins anew
    rewind_best(tmp_path, -1)
    assert names(tmp_path) == []
    rewind_best(tmp_path / "nowhere", 3)


@pytest.mark.parametrize("moment", ["aside", "renamed", "pointed"])
def test_whenever_it_is_killed_the_pointer_names_whole_models(moment: str, tmp_path: Path) -> None:
    best = Best(tmp_path, "a")
    commit(best, 1, 0.1, [1])
    record = best.record(2, {"a": 0.2})
    assert record is not None
    write(best.aside(record))
    if moment == "renamed":
        best.aside(record).rename(tmp_path / "step_2")
    elif moment == "pointed":
        best.commit(record, [1])
    (tmp_path / f"{POINTER}{TMP_SUFFIX}").write_text("{ half")
    stored = json.loads((tmp_path / POINTER).read_text())
    assert stored["step"] == (2 if moment == "pointed" else 1)
    assert (tmp_path / stored["folder"] / "actor" / "weights").is_file()
    rewind_best(tmp_path, 1)
    assert json.loads((tmp_path / POINTER).read_text())["step"] == 1 and "step_1" in names(tmp_path)
