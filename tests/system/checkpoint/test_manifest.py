"""Complete, incomplete and damaged checkpoints."""

import json
from pathlib import Path

import pytest
import torch

from realhf.api.layout import DeviceMesh, Layout, ParallelStrategy
from realhf.base.errors import UserError
from realhf.base.paths import RunDir
from realhf.system.checkpoint.best_models import BestModels
from realhf.system.checkpoint.manifest import Manifest, commit, newest, rewind, tmp_folder
from realhf.system.checkpoint.writer import CheckpointWriter, RoleCheckpoint, file_name

LAYOUT = Layout(DeviceMesh((0,)), ParallelStrategy())


def save(folder: Path, step: int, keep_last: int = 2) -> Path:
    writer = CheckpointWriter()
    writer.start(tmp_folder(folder, step), {file_name("actor", 0): {"weights": torch.full((1000,), float(step))}})
    manifest = Manifest(
        step, {"actor": {"kl_coef": 0.1 * step}}, {"actor": LAYOUT}, writer.wait(), "da7a", {"a.b": [1]}
    )
    return commit(folder, manifest, keep_last)


def test_the_last_checkpoint_is_used_and_older_ones_are_removed(tmp_path: Path) -> None:
    assert newest(tmp_path) is None
    for step in (2, 10, 4):
        place = save(tmp_path, step)
        assert newest(tmp_path) == (place, newest(tmp_path)[1]) and newest(tmp_path)[1].step == step
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step_10", "step_4"]
    save(tmp_path, 4)  # again, after a resume
    place, manifest = newest(tmp_path)
    assert RoleCheckpoint(place, "actor")(0)["weights"].tolist() == [4.0] * 1000
    assert manifest.states == {"actor": {"kl_coef": 0.4}} and manifest.layouts == {"actor": LAYOUT}
    assert manifest.options == {"a.b": [1]}


def test_incomplete_checkpoints_are_ignored_and_removed(tmp_path: Path) -> None:
    good = save(tmp_path, 2)
    half = tmp_folder(tmp_path, 4)
    half.mkdir()
    (half / file_name("actor", 0)).write_bytes(b"half a file")
    (tmp_path / "latest.unfinished").write_text("step_4")
    assert newest(tmp_path)[0] == good
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step_2"]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: path.unlink(), "is missing"),
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), "bytes, expected "),
        (lambda path: path.write_bytes(path.read_bytes()[:-1] + b"?"), "does not match its SHA-256"),
        (lambda path: (path.parent / "manifest.json").write_text("{"), "manifest cannot be read"),
        (lambda path: (path.parent / "manifest.json").write_text("{}"), "manifest cannot be read"),
    ],
)
def test_damaged_checkpoints_are_skipped(tmp_path: Path, damage, message: str) -> None:
    good, warnings = save(tmp_path, 2), list[str]()
    damage(save(tmp_path, 4) / file_name("actor", 0))
    assert newest(tmp_path, warnings.append)[0] == good and len(warnings) == 1 and message in warnings[0]
    damage(good / file_name("actor", 0))
    with pytest.raises(UserError, match="no undamaged checkpoint in ") as caught:
        newest(tmp_path)
    assert len([problem for problem in caught.value.problems if message in problem]) == 2


def test_a_failed_write_is_raised(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    writer = CheckpointWriter()
    writer.start(tmp_path / "file", {"a": {"weights": torch.zeros(1)}})
    with pytest.raises(OSError, match="the checkpoint in .*file cannot be written"):
        writer.wait()


def test_files_of_a_run_are_rewound_to_a_step(tmp_path: Path) -> None:
    paths = RunDir(tmp_path)
    paths.metrics.write_text("".join(json.dumps({"step": step}) + "\n" for step in (1, 2, 3)) + '{"step": 4, "ha')
    paths.events.write_text("".join(json.dumps({"span": {"step": step}}) + "\n" for step in (0, 1, 2)))
    paths.generations(1).parent.mkdir()
    for step in (1, 2, 3):
        paths.generations(step).write_text("{}\n")
    assert rewind(paths, 2) == 3  # the last completed step; an incomplete line is ignored
    assert [json.loads(line)["step"] for line in paths.metrics.read_text().splitlines()] == [1, 2]
    assert len(paths.events.read_text().splitlines()) == 2
    assert sorted(path.name for path in paths.generations(1).parent.iterdir()) == ["step_1.jsonl", "step_2.jsonl"]
    assert rewind(paths, 2) == 2


def test_evaluations_are_rewound(tmp_path: Path) -> None:
    """Including the evaluation before the first step."""
    paths, best = RunDir(tmp_path), BestModels(RunDir(tmp_path).best, "eval/accuracy")
    for step in (0, 1, 2):
        record = best.record(step, {"eval/accuracy": float(step)})
        assert record is not None
        best.tmp_folder(record).mkdir(parents=True)
        best.commit(record, [0, 1])
        with paths.evaluation.open("a") as file:
            file.write(json.dumps({"step": step}) + "\n")
    rewind(paths, 1)
    assert [json.loads(line)["step"] for line in paths.evaluation.read_text().splitlines()] == [0, 1]
    assert BestModels(paths.best, "eval/accuracy").records == best.records[:2]
    rewind(paths, -1)
    assert paths.evaluation.read_text() == "" and not list(paths.best.iterdir())
