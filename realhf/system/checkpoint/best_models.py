"""The best models of a run by an evaluation metric.

``best/best.json`` always names a complete folder ``best/step_N``: models are written to a temporary folder, renamed,
then referenced. Former best models are kept while a checkpoint exists that would make them the best again on resume.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec

from realhf.base.atomic_io import TMP_SUFFIX, atomic_write, discard, fsync_folder
from realhf.base.errors import RunFailed, UserError, damage_reported, did_you_mean

POINTER = "best.json"


@dataclass(frozen=True)
class BestRecord:
    """An evaluation after ``step`` steps that is better than all before it."""

    step: int
    value: float


class BestModels:
    """The records of a run. ``option`` is a metric, with a leading minus if less is better; empty disables them."""

    def __init__(self, folder: Path, option: str) -> None:
        self.folder, self.metric, self.sign = folder, option.removeprefix("-"), -1.0 if option[:1] == "-" else 1.0
        self.records = read_records(folder, self.metric) if option else []

    def record(self, step: int, metrics: Mapping[str, float]) -> BestRecord | None:
        """Return a record if the evaluation is strictly better than the last; ``RunFailed`` if it lacks the metric."""
        if not self.metric:
            return None
        if self.metric not in metrics:
            raise RunFailed(f"exp_ctrl.keep_best={self.metric}: the evaluation has no such metric (it has "
                            f"{', '.join(metrics)}){did_you_mean(self.metric, metrics)}")  # fmt: skip
        value = metrics[self.metric]
        if math.isnan(value) or (self.records and self.sign * value <= self.sign * self.records[-1].value):
            return None
        self.records.append(BestRecord(step, value))
        return self.records[-1]

    def tmp_folder(self, record: BestRecord) -> Path:
        """Return the temporary folder of a record's models, which has a folder per role."""
        return self.folder / f"step_{record.step}{TMP_SUFFIX}"

    def commit(self, record: BestRecord, checkpoints: Sequence[int]) -> Path:
        """Make the models of a record the best ones, and remove models that no checkpoint needs."""
        target = self.folder / f"step_{record.step}"
        if target.exists():
            discard(target)
        self.tmp_folder(record).rename(target)
        fsync_folder(self.folder)
        write_records(self.folder, self.metric, [r for r in self.records if r.step <= record.step])
        self.prune(checkpoints)
        return target

    def prune(self, checkpoints: Sequence[int]) -> None:
        """Remove models that are not the best, now or after resuming from one of ``checkpoints``."""
        committed = read_records(self.folder, self.metric)
        kept = {f"step_{step}" for step in steps_to_keep(committed, checkpoints)}
        for path in self.folder.glob("step_*") if committed else ():
            if path.name not in kept and path.suffix != TMP_SUFFIX:
                discard(path)


def steps_to_keep(records: Sequence[BestRecord], checkpoints: Iterable[int]) -> set[int]:
    """Return the step of the last record, and of the last one before every checkpoint."""
    ends = [*checkpoints, *(r.step for r in records[-1:])]
    earlier = ([r.step for r in records if r.step <= end] for end in ends)
    return {steps[-1] for steps in earlier if steps}


def read_pointer(folder: Path) -> tuple[str, list[BestRecord]]:
    """Return the metric and its records, in order, or none of both; ``UserError`` if the file is damaged."""
    path = folder / POINTER
    if not path.exists():
        return "", []
    with damage_reported(path, f"remove {folder}, which loses the best models so far"):
        stored = json.loads(path.read_text())
        return msgspec.convert(stored["metric"], str), msgspec.convert(stored["records"], list[BestRecord])


def read_records(folder: Path, metric: str) -> list[BestRecord]:
    """Return the records of ``metric``, in order."""
    stored, records = read_pointer(folder)
    return records if metric == stored else []


def write_records(folder: Path, metric: str, records: Sequence[BestRecord]) -> None:
    """Atomically make the last record the best one."""
    last = records[-1]
    pointer = {"metric": metric, **asdict(last), "folder": f"step_{last.step}", "records": [asdict(r) for r in records]}
    atomic_write(folder / POINTER, json.dumps(pointer, indent=1) + "\n")
    fsync_folder(folder)


def rewind_best(folder: Path, step: int) -> None:
    """Remove records after ``step`` steps, and models without a record; ``UserError`` if the best are missing."""
    metric, records = read_pointer(folder)
    records = [r for r in records if r.step <= step]
    if records and not (best := folder / f"step_{records[-1].step}").is_dir():
        raise UserError(f"{best} with the best models is missing; remove {folder}, which loses those so far")
    if records:
        write_records(folder, metric, records)
    else:
        (folder / POINTER).unlink(missing_ok=True)
    (folder / f"{POINTER}{TMP_SUFFIX}").unlink(missing_ok=True)
    for path in folder.glob("step_*"):
        if path.name not in {f"step_{r.step}" for r in records}:
            discard(path)
