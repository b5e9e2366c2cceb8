"""Complete, incomplete and damaged checkpoints."""

import hashlib
import json
import random
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from realhf.api.layout import DeviceMesh, Layout, ParallelStrategy
from realhf.base.errors import UserError
from realhf.base.paths import RunDir
from realhf.system.checkpoint.best_models import BestModels
from realhf.system.checkpoint.manifest import (
    Manifest,
    checkpoints_of,
    commit,
    newest,
    read_manifest,
    rewind,
    tmp_folder,
)
from realhf.system.checkpoint.writer import CheckpointWriter, RoleCheckpoint, file_name
from tests.scaling import examples

LAYOUT = Layout(DeviceMesh((0,)), ParallelStrategy())


def save(folder: Path, step: int, keep_last: int = 2) -> Path:
    writer = CheckpointWriter()
    writer.start(tmp_folder(folder, step), {file_name("actor", 0): {"weights": torch.full((1000,), float(step))}})
    states, fingerprint = {"actor": {"kl_coef": 0.1 * step}}, {"data": {"dataset.path": "da7a"}}
    manifest = Manifest(step, 20, states, {"actor": LAYOUT}, writer.wait(), fingerprint, {"a.b": [1]})
    return commit(folder, manifest, keep_last)


def test_the_last_checkpoint_is_used_and_older_ones_are_removed(tmp_path: Path) -> None:
    assert newest(tmp_path) is None
    for step in (2, 10, 4):
        place = save(tmp_path, step)
        assert newest(tmp_path) == (place, newest(tmp_path)[1]) and newest(tmp_path)[1].step == step
    assert checkpoints_of(tmp_path) == [2, 4, 10]
    save(tmp_path, 4, keep_last=1)  # again, after a resume
    assert checkpoints_of(tmp_path) == [4, 10]
    place, manifest = newest(tmp_path)
    assert RoleCheckpoint(place, "actor")(0)["weights"].tolist() == [4.0] * 1000
    assert manifest.states == {"actor": {"kl_coef": 0.4}} and manifest.layouts == {"actor": LAYOUT}
    assert manifest.options == {"a.b": [1]}


def test_incomplete_checkpoints_are_ignored_and_removed(tmp_path: Path) -> None:
    """The search changes nothing, since a run may be writing; a rewind removes them."""
    paths = RunDir(tmp_path)
    good = save(paths.checkpoints, 2)
    half = tmp_folder(paths.checkpoints, 4)
    half.mkdir()
    (half / file_name("actor", 0)).write_bytes(b"half a file")
    (paths.checkpoints / "latest.unfinished").write_text("step_4")
    assert newest(paths.checkpoints)[0] == good and half.is_dir()
    rewind(paths, 2)
    assert sorted(path.name for path in paths.checkpoints.iterdir()) == ["latest", "step_2"]


def sealed(checkpoint: Path, text: str) -> None:
    """Replace the manifest together with its checksum."""
    (checkpoint / "manifest.json").write_text(text)
    (checkpoint / "manifest.sha256").write_text(hashlib.sha256(text.encode()).hexdigest())


def edited(checkpoint: Path, **fields: object) -> None:
    sealed(checkpoint, json.dumps(json.loads((checkpoint / "manifest.json").read_text()) | fields))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: path.unlink(), "is missing"),
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), "bytes, expected "),
        (lambda path: path.write_bytes(path.read_bytes()[:-1] + b"?"), "does not match its SHA-256"),
        (lambda path: (path.parent / "manifest.json").write_text("{"), "does not match manifest.sha256"),
        (lambda path: sealed(path.parent, "{"), "JSONDecodeError"),
        (lambda path: sealed(path.parent, "{}"), "missing required field `step`"),
        (lambda path: sealed(path.parent, "[" * 100_000), "RecursionError"),
        (lambda path: edited(path.parent, step="4"), "Expected `int`, got `str`"),
        (lambda path: edited(path.parent, step=3), "it is of step 3"),
        (lambda path: (path.parent / "manifest.sha256").unlink(), "FileNotFoundError"),
        (lambda path: (path.parent / "manifest.json").write_bytes(b"\0" * 99), "does not match manifest.sha256"),
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


def test_the_checksum_of_a_manifest_is_in_standard_format(tmp_path: Path) -> None:
    command = ["sha256sum", "--check", "--strict", "manifest.sha256"]
    assert subprocess.run(command, cwd=save(tmp_path, 2), timeout=60).returncode == 0


@pytest.mark.parametrize("content", ["step_7", "", "../step_2", "step_2/../step_2", "\0", "step_02", None])
def test_a_pointer_without_a_checkpoint_is_reported(tmp_path: Path, content: str | None) -> None:
    good, warnings, pointer = save(tmp_path, 2), list[str](), tmp_path / "latest"
    pointer.unlink()
    pointer.mkdir() if content is None else pointer.write_text(content)
    assert newest(tmp_path, warnings.append)[0] == good
    assert len(warnings) == 1 and f"{pointer} names no checkpoint" in warnings[0]
    shutil.rmtree(good)
    with pytest.raises(UserError, match="names no checkpoint"):
        newest(tmp_path)


def test_lines_that_cannot_be_read_are_removed_with_a_warning(tmp_path: Path) -> None:
    paths, warnings = RunDir(tmp_path), list[str]()
    bad = [b"\0" * 50, b'{"step": 2, "ha', b'{"step": "2"}', b'{"step": true}', b"[]", b"7", b"\xff", b'{"span": 3}',
           b"[" * 100_000, b""]  # fmt: skip
    good = [b'{"step": 1, "loss": NaN}', b'{"step": 2, "text": "\xc3\xa9"}']
    for path in (paths.metrics, paths.evaluation):
        path.write_bytes(b"\n".join([good[0], *bad, good[1], b'{"step": 3}', b'{"step": 4, "inc']))
    assert rewind(paths, 2, warnings.append) == 3
    assert paths.metrics.read_bytes() == paths.evaluation.read_bytes() == b"\n".join(good) + b"\n"
    assert [str(path) in line and "10 of 13 lines" in line for path, line in
            zip((paths.metrics, paths.evaluation), warnings, strict=True)] == [True, True]  # fmt: skip


@pytest.mark.parametrize("content", ["", "{", "[]", '{"metric": 3, "records": []}', '{"metric": "a"}', None,
                                     '{"metric": "a", "records": [{"step": "1", "value": 2}]}'])  # fmt: skip
def test_a_damaged_list_of_best_models_is_refused_and_nothing_changes(tmp_path: Path, content: str | None) -> None:
    paths = RunDir(tmp_path)
    (paths.best / "step_1").mkdir(parents=True)
    paths.metrics.write_text('{"step": 9}\n')
    (paths.best / "best.json").mkdir() if content is None else (paths.best / "best.json").write_text(content)
    with pytest.raises(UserError, match=r"best.json is damaged \(.*\); remove .*best, which"):
        rewind(paths, 1)
    assert (paths.best / "step_1").is_dir() and paths.metrics.read_text() == '{"step": 9}\n'


def corrupt(path: Path, rng: random.Random) -> None:
    """Damage a file or folder as a faulty disk, an interrupted copy, or a careless user might."""
    if path.is_dir():
        other = path.with_name(f"step_{rng.randint(0, 9)}x")
        if rng.random() < 0.5 or other.exists():
            return shutil.rmtree(path)
        path.rename(other)
        return None
    data = path.read_bytes()
    at = rng.randrange(len(data) + 1)
    changes: list[Callable[[], bytes]] = [
        lambda: data[:at],
        lambda: data[:at] + bytes([rng.randrange(256)]) + data[at + 1 :],
        lambda: data[:at] + b"\0" * 64 + data[at + 64 :],
        lambda: data[:at] + b"\n" + data[at:],
        lambda: data.replace(b"4", b"2"),
        lambda: b"",
    ]
    path.unlink()
    kind = rng.randrange(len(changes) + 2)
    if kind < len(changes):
        path.write_bytes(changes[kind]())
    elif kind == len(changes):
        path.mkdir()


def step_of(line: bytes) -> int:
    values = json.loads(line)
    return values["step"] if "step" in values else values["span"]["step"] + 1


def add_stray(folder: Path, rng: random.Random) -> None:
    name = rng.choice(["step_x", "step_", "step_-1", "step_03", "step_9", "step_9.unfinished", "abc", "step_1e3"])
    path = folder / name
    if not path.exists():
        path.mkdir() if rng.random() < 0.5 else path.write_bytes(rng.randbytes(20))


@settings(max_examples=examples(150))
@given(st.integers(0, 1 << 32))
def test_a_corrupted_run_directory_is_resumed_correctly_or_refused(
    tmp_path_factory: pytest.TempPathFactory, seed: int
) -> None:
    rng, paths = random.Random(seed), RunDir(tmp_path_factory.mktemp("run"))
    originals = {step: read_manifest(save(paths.checkpoints, step)) for step in (2, 4)}
    shard = file_name("actor", 0)
    shards = {step: (paths.checkpoints / f"step_{step}" / shard).read_bytes() for step in originals}
    paths.metrics.write_text("".join(f'{{"step": {step}, "loss": 0.5}}\n' for step in range(1, 6)))
    paths.events.write_text("".join(f'{{"mfc": null, "span": {{"step": {step}}}}}\n' for step in range(5)))
    lines = {path: path.read_bytes().split(b"\n") for path in (paths.metrics, paths.events)}
    for _ in range(rng.randint(1, 3)):
        add_stray(paths.checkpoints, rng)
        corrupt(rng.choice([p for p in paths.root.rglob("*") if p != paths.checkpoints and p.exists()]), rng)
    damaged = {path: path.read_bytes().split(b"\n")[:-1] if path.is_file() else [] for path in lines}
    try:
        found = newest(paths.checkpoints, lambda line: None)
    except UserError as error:
        assert all("\n" not in problem and len(problem) < 600 for problem in error.problems)
        return
    if found is not None:
        place, manifest = found
        assert manifest == originals[manifest.step] and place.name == f"step_{manifest.step}"
        assert (place / shard).read_bytes() == shards[manifest.step]
        assert rewind(paths, manifest.step, lambda line: None) >= manifest.step
        save(paths.checkpoints, manifest.step + 1)
        assert newest(paths.checkpoints, lambda line: None)[1].step == manifest.step + 1
        for path, before in lines.items():
            kept = path.read_bytes().splitlines() if path.is_file() else []
            assert all(step_of(line) <= manifest.step for line in kept)
            assert set(before[: manifest.step]) - set(kept) <= set(before) - set(damaged[path])
