"""The best models of a run by its held-out rows: which evaluation they are of, and where they are kept.

``best/best.json`` names a folder ``best/step_N`` that is whole, at any moment: models are written aside, renamed, and
pointed at last. Former best ones stay as long as a checkpoint is there from which they would be the best again.
"""

import json
import math
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from realhf.base.atomic_io import TMP_SUFFIX, fsync_and_hash, fsync_folder
from realhf.base.errors import RunFailed, did_you_mean

POINTER = "best.json"


@dataclass(frozen=True)
class Record:
    """An evaluation after ``step`` steps that was better than all before it."""

    step: int
    value: float


class Best:
    """The records of a run. ``option`` is a metric, with a minus in front where less is better; empty: none is kept."""

    def __init__(self, folder: Path, option: str) -> None:
        self.folder, self.metric, self.sign = folder, option.removeprefix("-"), -1.0 if option[:1] == "-" else 1.0
        self.records = read_records(folder, self.metric) if option else []

    def record(self, step: int, metrics: Mapping[str, float]) -> Record | None:
        """Return the record that an evaluation is, None where it is none; of equal ones the first is.

        ``RunFailed`` where the evaluation has no such metric.
        """
        if not self.metric:
            return None
        if self.metric not in metrics:
            known = ", ".join(metrics)
            raise RunFailed(f"exp_ctrl.keep_best={self.metric}: the evaluation has no such metric (it has {known})"
                            f"{did_you_mean(self.metric, metrics)}")  # fmt: skip
        value = metrics[self.metric]
        if math.isnan(value) or (self.records and self.sign * value <= self.sign * self.records[-1].value):
            return None
        self.records.append(Record(step, value))
        return self.records[-1]

    def aside(self, record: Record) -> Path:
        """Return where the models of a record are written before they count, a folder for each role."""
        return self.folder / f"step_{record.step}{TMP_SUFFIX}"

    def commit(self, record: Record, checkpoints: Sequence[int]) -> Path:
        """Make the written models of a record count, and remove what no checkpoint needs."""
        place = self.folder / f"step_{record.step}"
        if place.exists():
            shutil.rmtree(place)
        self.aside(record).rename(place)
        fsync_folder(self.folder)
        write_records(self.folder, self.metric, [r for r in self.records if r.step <= record.step])
        self.prune(checkpoints)
        return place

    def prune(self, checkpoints: Sequence[int]) -> None:
        """Remove models that are neither the best nor would be after going on from one of ``checkpoints``."""
        pointed = read_records(self.folder, self.metric)
        kept = {f"step_{step}" for step in needed(pointed, checkpoints)}
        for path in self.folder.glob("step_*") if pointed else ():
            if path.name not in kept and path.suffix != TMP_SUFFIX:
                shutil.rmtree(path)


def needed(records: Sequence[Record], checkpoints: Iterable[int]) -> set[int]:
    """Return the steps of the best of all records, and of the best as of every checkpoint."""
    moments = [*checkpoints, *(r.step for r in records[-1:])]
    known = ([r.step for r in records if r.step <= moment] for moment in moments)
    return {steps[-1] for steps in known if steps}


def read_records(folder: Path, metric: str) -> list[Record]:
    """Return the records of a run, in order; none where another metric was looked at, or none yet."""
    path = folder / POINTER
    if not metric or not path.is_file():
        return []
    stored = json.loads(path.read_text())
    return [Record(**fields) for fields in stored["records"]] if stored["metric"] == metric else []


def write_records(folder: Path, metric: str, records: Sequence[Record]) -> None:
    """Point at the last record, in one move."""
    last, aside = records[-1], folder / f"{POINTER}{TMP_SUFFIX}"
    pointer = {"metric": metric, **asdict(last), "folder": f"step_{last.step}", "records": [asdict(r) for r in records]}
    aside.write_text(json.dumps(pointer, indent=1) + "\n")
    fsync_and_hash(aside)
    aside.rename(folder / POINTER)
    fsync_folder(folder)


def rewind_best(folder: Path, step: int) -> None:
    """Take back records after ``step`` steps, and remove models that are of none: for a run that goes on from there."""
    pointer = folder / POINTER
    metric = json.loads(pointer.read_text())["metric"] if pointer.is_file() else ""
    records = [r for r in read_records(folder, metric) if r.step <= step]
    if records:
        write_records(folder, metric, records)
    else:
        pointer.unlink(missing_ok=True)
    (folder / f"{POINTER}{TMP_SUFFIX}").unlink(missing_ok=True)
    for path in folder.glob("step_*"):
        if path.name not in {f"step_{r.step}" for r in records}:
            shutil.rmtree(path)
