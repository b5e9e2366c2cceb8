"""Checkpoints as a whole: what is in one, when it counts, which one a run goes on from.

A checkpoint is written aside, fsync_and_hash, renamed, and pointed at last; whatever else lies there was not finished.
"""

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from realhf.api.codec import from_plain, to_plain
from realhf.api.config import ExperimentConfig
from realhf.api.layout import Layout
from realhf.api.messages import State
from realhf.base.atomic_io import TMP_SUFFIX, Digests, atomic_write, fsync_and_hash, fsync_folder, sha256
from realhf.base.errors import UserError
from realhf.base.paths import RunDir
from realhf.system.checkpoint.best_models import rewind_best

MANIFEST, POINTER = "manifest.json", "latest"


@dataclass(frozen=True)
class Manifest:
    """A checkpoint after ``step`` steps. ``layouts`` are where roles that training changes were when it was taken.

    ``states`` are what interfaces remember, ``data`` is the SHA-256 of the data file, ``options`` are the run's.
    """

    step: int
    states: dict[str, State]
    layouts: dict[str, Layout]
    files: Digests
    data: str
    options: dict[str, Any] = field(default_factory=dict)


def aside(folder: Path, step: int) -> Path:
    """Return where a checkpoint is written before it counts."""
    return folder / f"step_{step}{TMP_SUFFIX}"


def commit(folder: Path, manifest: Manifest, keep_last: int) -> Path:
    """Make a written checkpoint count, and remove those before the last ``keep_last`` (0: none is removed)."""
    place, target = aside(folder, manifest.step), folder / f"step_{manifest.step}"
    place.mkdir(parents=True, exist_ok=True)
    _write(place / MANIFEST, json.dumps(to_plain(manifest), indent=1))
    fsync_folder(place)
    if target.exists():
        shutil.rmtree(target)
    place.rename(target)
    fsync_folder(folder)
    _write(folder / f"{POINTER}{TMP_SUFFIX}", target.name)
    (folder / f"{POINTER}{TMP_SUFFIX}").rename(folder / POINTER)
    fsync_folder(folder)
    for old in _by_step(folder)[:-keep_last] if keep_last else []:
        shutil.rmtree(old)
    return target


def newest(folder: Path, say: Callable[[str], None] = print) -> tuple[Path, Manifest] | None:
    """Return the last good checkpoint, None where there never was one.

    What was written aside and never finished is removed. ``say`` hears of damaged checkpoints that are passed over;
    ``UserError`` where none is good.
    """
    for path in folder.glob(f"*{TMP_SUFFIX}"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    last = folder / (folder / POINTER).read_text().strip() if (folder / POINTER).is_file() else None
    problems: list[str] = []
    for place in dict.fromkeys([*([last] if last else []), *reversed(_by_step(folder))]):
        if not (damaged := damages(place)):
            for problem in problems:
                say(f"damaged {problem}")
            return place, read_manifest(place)
        problems += damaged
    if problems:
        raise UserError([*problems, f"no checkpoint in {folder} is whole; start a new run with overwrite=True"])
    return None


def _by_step(folder: Path) -> list[Path]:
    found = (path for path in folder.glob("step_*") if path.suffix != TMP_SUFFIX)
    return sorted(found, key=lambda path: int(path.name.removeprefix("step_")))


def checkpoints_of(folder: Path) -> list[int]:
    """Return the steps after which there is a checkpoint, in order."""
    return [int(path.name.removeprefix("step_")) for path in _by_step(folder)]


def read_manifest(place: Path) -> Manifest:
    return from_plain(json.loads((place / MANIFEST).read_text()), Manifest)


def flat_options(config: ExperimentConfig) -> dict[str, object]:
    """Return all options by their full names, as plain values."""

    def flatten(tree: Mapping[str, object], prefix: str) -> Iterator[tuple[str, object]]:
        for key, value in tree.items():
            if isinstance(value, Mapping):
                yield from flatten(value, f"{prefix}{key}.")
            else:
                yield f"{prefix}{key}", value

    return dict(flatten(to_plain(config), ""))


def rewind(paths: RunDir, step: int) -> int:
    """Take back what a run wrote down after ``step`` steps, line by line, and its best models since; -1: all of it.

    Return the last step that it had done.
    """
    last: dict[Path, Callable[[dict], int]] = {
        paths.metrics: lambda line: line["step"],
        paths.evaluation: lambda line: line["step"],
        paths.events: lambda line: line["span"]["step"] + 1,
    }
    done = step
    for path, step_of in last.items():
        if path.is_file():
            lines = [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
            steps = [step_of(json.loads(line)) for line in lines]
            done = max([done, *steps]) if path == paths.metrics else done
            atomic_write(path, "".join(line for line, at in zip(lines, steps, strict=True) if at <= step))
    for path in (paths.root / "generations").glob("step_*.jsonl"):
        if int(path.stem.removeprefix("step_")) > step:
            path.unlink()
    rewind_best(paths.best, step)
    return done


def damages(place: Path) -> list[str]:
    """Return what is wrong with a checkpoint, one line each."""
    try:
        manifest = read_manifest(place)
    except Exception as error:  # of many kinds: files, JSON, types
        return [f"{place}: the manifest cannot be read: {type(error).__name__}: {error}"]
    problems = []
    for name, (digest, size) in sorted(manifest.files.items()):
        path = place / name
        if not path.is_file():
            problems.append(f"{path} is missing")
        elif path.stat().st_size != size:
            problems.append(f"{path} has {path.stat().st_size} bytes, {size} were written")
        elif sha256(path) != digest:
            problems.append(f"{path} holds other bytes than were written")
    return problems


def _write(path: Path, text: str) -> None:
    path.write_text(text)
    fsync_and_hash(path)
