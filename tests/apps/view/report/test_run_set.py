"""Runs of directories, with stages that start later."""

import os
import shutil
from pathlib import Path

import pytest

from realhf.apps.view.report.run_set import RunSet, runs_of, short_names
from realhf.base.errors import UserError
from tests.apps.commands.test_report import prepared


def test_short_names() -> None:
    roots = [Path("/a/b/run"), Path("/a/c/run"), Path("/a/c/other"), Path("/a/c/other")]
    assert short_names(roots) == ["b/run", "c/run", "other", "other (2)"]


def test_stages_are_runs_in_order_of_their_starts(tmp_path: Path) -> None:
    root = prepared(tmp_path / "restem", stages_json="{}", config_yaml="")
    with pytest.raises(UserError, match="several runs, but none has started"):
        runs_of(root)
    for i, name in enumerate(("zero", "b", "a")):
        os.utime(prepared(root / name, plan_json="{}") / "plan.json", (i, i))
    assert [run.name for run in runs_of(root)] == ["zero", "b", "a"]
    runs = RunSet([root, root / "a"])
    assert [reader.name for reader in runs.readers] == [
        "zero",
        "b",
        "a",
        "a (2)",
    ] and runs.title == "Comparison of 4 runs"


def test_a_stage_that_starts_later_joins_the_page(tmp_path: Path) -> None:
    root = prepared(tmp_path / "restem", stages_json="{}", config_yaml="")
    prepared(root / "one", plan_json="{}", metrics_jsonl='{"step": 1, "loss": 1}\n')
    runs = RunSet([root])
    assert runs.update() and not runs.update()
    (first,) = runs.readers
    prepared(root / "two", plan_json="{}")
    assert runs.update() and runs.readers[0] is first and [reader.name for reader in runs.readers] == ["one", "two"]
    shutil.rmtree(root)
    assert runs.update() and len(runs.readers) == 2 and first.metrics.n_steps == 1
    assert "no longer exists" in first.problems[0]


def test_folders_without_a_run(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="has no run: config.yaml or plan.json is missing"):
        runs_of(tmp_path)
    with pytest.raises(UserError, match="a page has at most"):
        RunSet([prepared(tmp_path / "r", config_yaml="")] * 40)
