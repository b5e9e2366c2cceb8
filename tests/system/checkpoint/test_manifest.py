"""Checkpoints that count and checkpoints that do not."""

import json
from pathlib import Path

import pytest
import torch

from realhf.api.layout import DeviceMesh, Layout, ParallelStrategy
from realhf.base.errors import UserError
from realhf.base.paths import RunDir
from realhf.system.checkpoint.best_models import Best
from realhf.system.checkpoint.manifest import Manifest, aside, commit, newest, rewind
from realhf.system.checkpoint.writer import Saved, Writer, file_name

LAYOUT = Layout(DeviceMesh((0,)), ParallelStrategy())


def take(folder: Path, step: int, keep_last: int = 2) -> Path:
    writer = Writer()
    writer.begin(aside(folder, step), {file_name("actor", 0): {"weights": torch.full((1000,), float(step))}})
    manifest = Manifest(
        step, {"actor": {"kl_coef": 0.1 * step}}, {"actor": LAYOUT}, writer.settle(), "da7a", {"a.b": [1]}
    )
    return commit(folder, manifest, keep_last)


def test_the_last_one_counts_and_older_ones_go(tmp_path: Path) -> None:
    assert newest(tmp_path) is None
    for step in (2, 10, 4):
        place = take(tmp_path, step)
        assert newest(tmp_path) == (place, newest(tmp_path)[1]) and newest(tmp_path)[1].step == step
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step_10", "step_4"]
    take(tmp_path, 4)  # again, after going back
    place, manifest = newest(tmp_path)
    assert Saved(place, "actor")(0)["weights"].tolist() == [4.0] * 1000
    assert manifest.states == {"actor": {"kl_coef": 0.4}} and manifest.layouts == {"actor": LAYOUT}
    assert manifest.options == {"a.b": [1]}


def test_what_was_not_finished_never_counts(tmp_path: Path) -> None:
    good = take(tmp_path, 2)
    half = aside(tmp_path, 4)
    half.mkdir()
    (half / file_name("actor", 0)).write_bytes(b"half a file")
    (tmp_path / "latest.unfinished").write_text("step_4")
    assert newest(tmp_path)[0] == good
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step_2"]


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda path: path.unlink(), "is missing"),
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), "bytes, "),
        (lambda path: path.write_bytes(path.read_bytes()[:-1] + b"?"), "other bytes"),
        (lambda path: (path.parent / "manifest.json").write_text("{"), "manifest cannot be read"),
        (lambda path: (path.parent / "manifest.json").write_text("{}"), "manifest cannot be read"),
    ],
)
def test_a_damaged_one_is_passed_over(tmp_path: Path, damage, words: str) -> None:
    good, said = take(tmp_path, 2), list[str]()
    damage(take(tmp_path, 4) / file_name("actor", 0))
    assert newest(tmp_path, said.append)[0] == good and len(said) == 1 and words in said[0]
    damage(good / file_name("actor", 0))
    with pytest.raises(UserError, match="no checkpoint in .* is whole") as caught:
        newest(tmp_path)
    assert len([problem for problem in caught.value.problems if words in problem]) == 2


def test_a_full_disk_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    writer = Writer()
    writer.begin(tmp_path / "file", {"a": {"weights": torch.zeros(1)}})
    with pytest.raises(OSError, match="the checkpoint in .*file cannot be written"):
        writer.settle()


def test_files_of_a_run_go_back_to_a_step(tmp_path: Path) -> None:
    paths = RunDir(tmp_path)
    paths.metrics.write_text("".join(json.dumps({"step": step}) + "\n" for step in (1, 2, 3)) + '{"step": 4, "ha')
    paths.events.write_text("".join(json.dumps({"span": {"step": step}}) + "\n" for step in (0, 1, 2)))
    paths.generations(1).parent.mkdir()
    for step in (1, 2, 3):
        paths.generations(step).write_text("{}\n")
    assert rewind(paths, 2) == 3  # which had been done; half a line is no step
    assert [json.loads(line)["step"] for line in paths.metrics.read_text().splitlines()] == [1, 2]
    assert len(paths.events.read_text().splitlines()) == 2
    assert sorted(path.name for path in paths.generations(1).parent.iterdir()) == ["step_1.jsonl", "step_2.jsonl"]
    assert rewind(paths, 2) == 2


def test_what_was_tried_goes_back_too(tmp_path: Path) -> None:
    """Held-out rows are tried before the first step as well: a run that starts over takes back that line."""
    paths, best = RunDir(tmp_path), Best(RunDir(tmp_path).best, "eval/accuracy")
    for step in (0, 1, 2):
        record = best.record(step, {"eval/accuracy": float(step)})
        assert record is not None
        best.aside(record).mkdir(parents=True)
        best.commit(record, [0, 1])
        with paths.evaluation.open("a") as file:
            file.write(json.dumps({"step": step}) + "\n")
    rewind(paths, 1)
    assert [json.loads(line)["step"] for line in paths.evaluation.read_text().splitlines()] == [0, 1]
    assert Best(paths.best, "eval/accuracy").records == best.records[:2]
    rewind(paths, -1)
    assert paths.evaluation.read_text() == "" and not list(paths.best.iterdir())
