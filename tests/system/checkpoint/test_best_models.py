"""Best models: records, former models, and interrupted runs."""

import json
import shutil
from pathlib import Path

import pytest

from realhf.base.errors import UserError
from realhf.system.checkpoint.best_models import (
    POINTER,
    TMP_SUFFIX,
    BestModels,
    BestRecord,
    read_records,
    rewind_best,
    steps_to_keep,
)


def commit(best: BestModels, step: int, value: float, checkpoints: list[int]) -> None:
    record = best.record(step, {best.metric: value})
    assert record is not None
    write(best.tmp_folder(record))
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
def test_records(option: str, values: list[float], steps: list[int], tmp_path: Path) -> None:
    best = BestModels(tmp_path, option)
    records = [best.record(step, {best.metric: value}) for step, value in enumerate(values)]
    assert [record.step for record in records if record] == steps == [record.step for record in best.records]


def test_disabled_without_a_metric(tmp_path: Path) -> None:
    assert BestModels(tmp_path, "").record(1, {"eval/accuracy": 1.0}) is None
    BestModels(tmp_path / "nowhere", "").prune([1, 2])


def test_steps_to_keep_for_checkpoints() -> None:
    records = [BestRecord(0, 0.1), BestRecord(3, 0.2), BestRecord(8, 0.3), BestRecord(9, 0.4)]
    assert (
        steps_to_keep(records, []) == {9}
        and steps_to_keep(records, [3, 4, 7]) == {3, 9}
        and steps_to_keep(records, [2, 8]) == {0, 8, 9}
    )
    assert steps_to_keep([], [1]) == set() and steps_to_keep([BestRecord(5, 1.0)], [2]) == {5}


def test_former_models_are_kept_while_a_checkpoint_needs_them(tmp_path: Path) -> None:
    best = BestModels(tmp_path, "a")
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


def test_a_resumed_run_removes_later_models(tmp_path: Path) -> None:
    best = BestModels(tmp_path, "a")
    for step, value in ((0, 0.1), (3, 0.2), (5, 0.3)):
        commit(best, step, value, [4])
    write(tmp_path / f"step_6{TMP_SUFFIX}")  # killed while writing
    write(tmp_path / "step_7")  # killed before the pointer was written
    rewind_best(tmp_path, 4)
    assert names(tmp_path) == [POINTER, "step_3"] and read_records(tmp_path, "a") == best.records[:2]
    resumed = BestModels(tmp_path, "a")
    assert resumed.record(4, {"a": 0.15}) is None
    commit(resumed, 5, 0.3, [4])
    assert resumed.records == best.records and names(tmp_path) == [POINTER, "step_3", "step_5"]
    assert BestModels(tmp_path, "b").records == []  # another metric starts without records
    rewind_best(tmp_path, -1)
    assert names(tmp_path) == []
    rewind_best(tmp_path / "nowhere", 3)


@pytest.mark.parametrize("moment", ["written", "renamed", "committed"])
def test_the_pointer_always_names_complete_models(moment: str, tmp_path: Path) -> None:
    best = BestModels(tmp_path, "a")
    commit(best, 1, 0.1, [1])
    record = best.record(2, {"a": 0.2})
    assert record is not None
    write(best.tmp_folder(record))
    if moment == "renamed":
        best.tmp_folder(record).rename(tmp_path / "step_2")
    elif moment == "committed":
        best.commit(record, [1])
    (tmp_path / f"{POINTER}{TMP_SUFFIX}").write_text("{ half")
    stored = json.loads((tmp_path / POINTER).read_text())
    assert stored["step"] == (2 if moment == "committed" else 1)
    assert (tmp_path / stored["folder"] / "actor" / "weights").is_file()
    rewind_best(tmp_path, 1)
    assert json.loads((tmp_path / POINTER).read_text())["step"] == 1 and "step_1" in names(tmp_path)


def test_missing_best_models_are_refused(tmp_path: Path) -> None:
    best = BestModels(tmp_path, "a")
    for step in (1, 2, 3):
        commit(best, step, float(step), [1, 2])
    shutil.rmtree(tmp_path / "step_2")
    with pytest.raises(UserError, match=r"step_2 with the best models is missing; remove "):
        rewind_best(tmp_path, 2)
    rewind_best(tmp_path, 3)
    assert names(tmp_path) == ["best.json", "step_1", "step_3"]
