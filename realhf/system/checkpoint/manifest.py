"""Checkpoints of all workers: manifest, commit, and the search for the one to resume from.

A checkpoint is written to a temporary folder, synced, renamed, then referenced; other files there are incomplete.
"""

import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from realhf.api.codec import from_plain, to_plain
from realhf.api.config import ExperimentConfig
from realhf.api.config.option import leaves
from realhf.api.layout import Layout
from realhf.api.messages import State
from realhf.base.atomic_io import TMP_SUFFIX, Digests, atomic_write, fsync_and_hash, fsync_folder, sha256
from realhf.base.errors import UserError
from realhf.base.paths import RunDir
from realhf.system.checkpoint.best_models import rewind_best

MANIFEST, POINTER = "manifest.json", "latest"


@dataclass(frozen=True)
class Manifest:
    """A checkpoint after ``step`` steps: interface states, layouts of trained roles, SHA-256 of the data, options."""

    step: int
    states: dict[str, State]
    layouts: dict[str, Layout]
    files: Digests
    data: str
    options: dict[str, Any] = field(default_factory=dict)


def tmp_folder(folder: Path, step: int) -> Path:
    return folder / f"step_{step}{TMP_SUFFIX}"


def commit(folder: Path, manifest: Manifest, keep_last: int) -> Path:
    """Make a written checkpoint the latest, and remove those before the last ``keep_last`` (0: none)."""
    tmp, target = tmp_folder(folder, manifest.step), folder / f"step_{manifest.step}"
    tmp.mkdir(parents=True, exist_ok=True)
    (tmp / MANIFEST).write_text(json.dumps(to_plain(manifest), indent=1))
    fsync_and_hash(tmp / MANIFEST)
    fsync_folder(tmp)
    if target.exists():
        shutil.rmtree(target)
    tmp.rename(target)
    fsync_folder(folder)
    atomic_write(folder / POINTER, target.name)
    fsync_folder(folder)
    for old in checkpoints_of(folder)[:-keep_last] if keep_last else []:
        shutil.rmtree(folder / f"step_{old}")
    return target


def newest(folder: Path, warn: Callable[[str], None] = print) -> tuple[Path, Manifest] | None:
    """Return the last undamaged checkpoint, or None without checkpoints; ``UserError`` if all are damaged.

    Incomplete checkpoints are removed; damaged ones are skipped with a call of ``warn``.
    """
    for path in folder.glob(f"*{TMP_SUFFIX}"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    latest = [folder / (folder / POINTER).read_text().strip()] if (folder / POINTER).is_file() else []
    problems: list[str] = []
    by_step = [folder / f"step_{step}" for step in reversed(checkpoints_of(folder))]
    for path in dict.fromkeys([*latest, *by_step]):
        if not (damage := find_damage(path)):
            for problem in problems:
                warn(f"damaged {problem}")
            return path, read_manifest(path)
        problems += damage
    if problems:
        raise UserError([*problems, f"no undamaged checkpoint in {folder}; start a new run with overwrite=True"])
    return None


def checkpoints_of(folder: Path) -> list[int]:
    """Return the steps of the checkpoints, in order."""
    return sorted(int(path.name.removeprefix("step_")) for path in folder.glob("step_*") if path.suffix != TMP_SUFFIX)


def read_manifest(checkpoint: Path) -> Manifest:
    return from_plain(json.loads((checkpoint / MANIFEST).read_text()), Manifest)


def flat_options(config: ExperimentConfig) -> dict[str, object]:
    """Return all options as plain values by their full names.

    An option given as ``${...}`` is its text and a short digest of its value, which shows changes but no secrets.
    """
    options = {key: to_plain(value) for key, _, value in leaves(config)}
    for key, text in config.unresolved().items():
        options[key] = f"{text} (SHA-256 {hashlib.sha256(repr(options[key]).encode()).hexdigest()[:8]})"
    return options


def rewind(paths: RunDir, step: int) -> int:
    """Remove output and best models of a run after ``step`` steps (-1: all). Return the last completed step."""
    step_of_line: dict[Path, Callable[[dict], int]] = {
        paths.metrics: lambda line: line["step"],
        paths.evaluation: lambda line: line["step"],
        paths.events: lambda line: line["span"]["step"] + 1,
    }
    last = step
    for path, step_of in step_of_line.items():
        if path.is_file():
            lines = [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
            steps = [step_of(json.loads(line)) for line in lines]
            last = max([last, *steps]) if path == paths.metrics else last
            atomic_write(path, "".join(line for line, at in zip(lines, steps, strict=True) if at <= step))
    for path in (paths.root / "generations").glob("step_*.jsonl"):
        if int(path.stem.removeprefix("step_")) > step:
            path.unlink()
    rewind_best(paths.best, step)
    return last


def find_damage(checkpoint: Path) -> list[str]:
    """Return the problems of a checkpoint, one line each."""
    try:
        manifest = read_manifest(checkpoint)
    except Exception as error:  # OSError, JSON and type errors
        return [f"{checkpoint}: the manifest cannot be read: {type(error).__name__}: {error}"]
    problems = []
    for name, (digest, size) in sorted(manifest.files.items()):
        path = checkpoint / name
        if not path.is_file():
            problems.append(f"{path} is missing")
        elif path.stat().st_size != size:
            problems.append(f"{path} has {path.stat().st_size} bytes, expected {size}")
        elif sha256(path) != digest:
            problems.append(f"{path} does not match its SHA-256")
    return problems
