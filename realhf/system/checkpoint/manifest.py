"""Checkpoints of all workers: manifest, commit, and the search for the one to resume from.

A checkpoint is written to a temporary folder, synced, renamed, then referenced; other files there are incomplete.
"""

import hashlib
import json
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from realhf.api.batch_meta import BatchMeta
from realhf.api.codec import to_plain
from realhf.api.config import ExperimentConfig
from realhf.api.config.option import leaves
from realhf.api.layout import Layout
from realhf.api.messages import State, Stats
from realhf.base.atomic_io import TMP_SUFFIX, Digests, atomic_write, discard, fsync_and_hash, fsync_folder, sha256
from realhf.base.errors import UserError, damage_reported
from realhf.base.paths import RunDir
from realhf.data.curriculum import CurriculumState
from realhf.plan.fingerprint import Fingerprint
from realhf.plan.train_schedule import PromptRange
from realhf.system.checkpoint.best_models import rewind_best

MANIFEST, CHECKSUM, POINTER = "manifest.json", "manifest.sha256", "latest"
CHECKPOINT = re.compile(r"step_(0|[1-9][0-9]*)")


@dataclass(frozen=True)
class Rollout:
    """A generating call of a later step, with weights that the checkpoint no longer has: its results."""

    mfc: str
    span: PromptRange
    outputs: BatchMeta
    stats: Stats


@dataclass(frozen=True)
class Manifest:
    """A checkpoint after ``step`` of ``n_steps`` steps, with the layouts of trained roles and the options.

    ``accepted`` lists the differences (step, part) that earlier resumes have accepted. ``carried`` are rows for the
    next step's prompts. ``curriculum`` determines the rows of later steps.
    """

    step: int
    n_steps: int
    states: dict[str, State]
    layouts: dict[str, Layout]
    files: Digests
    fingerprint: Fingerprint
    options: dict[str, Any]
    accepted: list[tuple[int, str]] = field(default_factory=list)
    rollouts: list[Rollout] = field(default_factory=list)
    carried: BatchMeta | None = None
    curriculum: CurriculumState | None = None


def tmp_folder(folder: Path, step: int) -> Path:
    return folder / f"step_{step}{TMP_SUFFIX}"


def commit(folder: Path, manifest: Manifest, keep_last: int) -> Path:
    """Make a written checkpoint the latest of the last ``keep_last`` (0: all), and remove those before."""
    tmp, target, pointer = tmp_folder(folder, manifest.step), folder / f"step_{manifest.step}", folder / POINTER
    tmp.mkdir(parents=True, exist_ok=True)
    (tmp / MANIFEST).write_text(json.dumps(msgspec.to_builtins(manifest), indent=1))
    digest, _ = fsync_and_hash(tmp / MANIFEST)
    (tmp / CHECKSUM).write_text(f"{digest}  {MANIFEST}\n")  # for sha256sum --check
    fsync_and_hash(tmp / CHECKSUM)
    fsync_folder(tmp)
    if target.exists():
        discard(target)
    if os.path.lexists(pointer) and not pointer.is_file():
        discard(pointer)
    tmp.rename(target)
    fsync_folder(folder)
    atomic_write(pointer, target.name)
    fsync_folder(folder)
    present = [step for step in checkpoints_of(folder) if step <= manifest.step]  # later ones were damaged
    for old in present[:-keep_last] if keep_last else []:
        discard(folder / f"step_{old}")
    return target


def newest(folder: Path, warn: Callable[[str], None] = print) -> tuple[Path, Manifest] | None:
    """Return the last undamaged checkpoint, or None without checkpoints; ``UserError`` if all are damaged.

    Damaged checkpoints, and files that belong to none, are skipped with a call of ``warn``. Changes nothing.
    """
    with damage_reported(folder, "the checkpoints cannot be used"):
        paths, problems = _candidates(folder)
    for path in paths:
        if isinstance(manifest := read_undamaged(path), Manifest):
            for problem in problems:
                warn(f"damaged {problem}")
            return path, manifest
        problems += manifest
    if problems:
        raise UserError([*problems, f"no undamaged checkpoint in {folder}; start a new run with overwrite=True"])
    return None


def is_resumable(folder: Path) -> bool:
    """Return True if there are checkpoints, damaged or not, or files that look like one; reads no checkpoint."""
    with damage_reported(folder, "the checkpoints cannot be used"):
        return any(_candidates(folder))


def _candidates(folder: Path) -> tuple[list[Path], list[str]]:
    """Return the checkpoints, the first to try first, and the files that belong to none."""
    pointer = folder / POINTER
    names = [f"step_{step}" for step in reversed(checkpoints_of(folder))]
    strays = [path for path in sorted(folder.glob("step_*")) if path.name not in names and path.suffix != TMP_SUFFIX]
    problems = [f"{path} is not a checkpoint" for path in strays]
    if os.path.lexists(pointer):
        latest = pointer.read_text(errors="replace").strip() if pointer.is_file() else "no file"
        problems += [] if latest in names else [f"{pointer} names no checkpoint: {latest!r:.80}"]
        names.sort(key=lambda name: name != latest)
    return [folder / name for name in names], problems


def checkpoints_of(folder: Path) -> list[int]:
    """Return the steps of the checkpoints, in order."""
    found = [CHECKPOINT.fullmatch(path.name) for path in folder.glob("step_*") if path.is_dir()]
    return sorted(int(match[1]) for match in found if match)


def read_manifest(checkpoint: Path) -> Manifest:
    """Return the manifest in a folder; ``UserError`` if it has been edited, damaged or moved to another step."""
    with damage_reported(checkpoint / MANIFEST, "the checkpoint cannot be used"):
        for path in (checkpoint / MANIFEST, checkpoint / CHECKSUM):
            if path.exists() and not path.is_file():  # opening a pipe would wait for its writer
                raise ValueError(f"{path.name} is not a regular file")
        content = (checkpoint / MANIFEST).read_bytes()
        if hashlib.sha256(content).hexdigest() not in (checkpoint / CHECKSUM).read_text().split():
            raise ValueError(f"it does not match {CHECKSUM}")
        manifest = msgspec.convert(json.loads(content), Manifest)
        if checkpoint.name != f"step_{manifest.step}":
            raise ValueError(f"it is of step {manifest.step}")
        return manifest


def flat_options(config: ExperimentConfig) -> dict[str, object]:
    """Return all options as plain values by their full names.

    An option given as ``${...}`` is its text and a short digest of its value, which shows changes but no secrets.
    """
    options = {key: to_plain(value) for key, _, value in leaves(config)}
    for key, text in config.unresolved().items():
        value = options[key]
        value = [config.portable(v) for v in value] if isinstance(value, list) else config.portable(value)
        options[key] = f"{text} (SHA-256 {hashlib.sha256(repr(value).encode()).hexdigest()[:8]})"
    return options


def rewind(paths: RunDir, step: int, warn: Callable[[str], None] = print) -> int:
    """Remove output and best models of a run after ``step`` steps (-1: all), and incomplete checkpoints.

    Return the last completed step. Lines that cannot be read are removed with a call of ``warn``; ``UserError`` if
    the list of best models cannot be read.
    """
    rewind_best(paths.best, step)
    for path in paths.checkpoints.glob(f"*{TMP_SUFFIX}"):
        discard(path)
    steps_of = {path: _rewind_lines(path, step, warn) for path in (paths.metrics, paths.evaluation, paths.events)}
    for path in paths.samples.glob("step_*.jsonl"):
        if (match := CHECKPOINT.fullmatch(path.stem)) and int(match[1]) > step:
            discard(path)
    return max([step, *steps_of[paths.metrics]])


def _rewind_lines(path: Path, step: int, warn: Callable[[str], None]) -> list[int]:
    """Keep the lines of a file until ``step``, and return the steps of all of them. The last may be incomplete."""
    if not path.is_file():
        return []
    lines = path.read_bytes().split(b"\n")[:-1]
    steps = [*map(_step_of, lines)]
    if damaged := steps.count(None):
        warn(f"damaged {path}: {damaged} of {len(lines)} lines cannot be read and are removed")
    kept = [line.decode() + "\n" for line, at in zip(lines, steps, strict=True) if at is not None and at <= step]
    atomic_write(path, "".join(kept))
    return [at for at in steps if at is not None]


def _step_of(line: bytes) -> int | None:
    """Return the number of completed steps in a line of metrics or events, None if it cannot be read."""
    try:
        values = json.loads(line.decode())
        step = values["span"]["step"] + 1 if "span" in values else values["step"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    return step if type(step) is int else None


def read_undamaged(checkpoint: Path) -> Manifest | list[str]:
    """Return the manifest of a checkpoint, or its problems, one line each."""
    try:
        manifest = read_manifest(checkpoint)
    except UserError as error:
        return error.problems
    problems = [_file_problem(checkpoint / name, *expected) for name, expected in sorted(manifest.files.items())]
    return [problem for problem in problems if problem] or manifest


def _file_problem(path: Path, digest: str, size: int) -> str:
    try:
        if not path.is_file():
            return f"{path} is missing"
        if path.stat().st_size != size:
            return f"{path} has {path.stat().st_size} bytes, expected {size}"
        return "" if sha256(path) == digest else f"{path} does not match its SHA-256"
    except OSError as error:  # a faulty disk, or no permission
        return f"{path} cannot be read: {error}"
