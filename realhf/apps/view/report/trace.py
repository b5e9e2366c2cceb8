"""The measured timeline of the last complete step, from the end of ``trace.json``."""

from bisect import bisect_right, insort
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from realhf.api.program import Instruction
from realhf.apps.view.report.metrics_file import read_object
from realhf.plan.run_spec import RunSpec
from realhf.plan.search.timeline import Activity, Timeline

MAX_LANES = 64
CLOCK_S = 1e-3  # tolerance between the end of one activity and the start of the next
FIRST_TAIL, MAX_TAIL = 4 << 20, 64 << 20  # bytes


class TraceArguments(msgspec.Struct):
    step: int


class TraceEvent(msgspec.Struct):
    """A span of a worker; times in microseconds."""

    name: str
    ph: str
    pid: int
    ts: float
    dur: float
    args: TraceArguments


@dataclass(frozen=True)
class WorkerSpan:
    name: str
    rank: int
    start: float
    end: float


def measured(run: RunSpec) -> tuple[int, Timeline] | None:
    """Return the last step in the trace in which every call has finished, with its timeline."""
    required = {f"{mfc.name}/Compute" for mfc in run.graph.mfcs}
    last = last_complete(run.paths.trace, required)
    if last is None:
        return None
    step, spans = last
    n_lanes = min(run.plan.n_workers, MAX_LANES)
    instructions = {f"{mfc}/{type(step).__name__}": step for mfc, steps in run.program.items() for step in steps}
    activities = activities_of([span for span in spans if span.rank < n_lanes], instructions, step)
    if not activities:
        return None
    return step, Timeline(n_lanes, tuple(activities), (max(a.end for a in activities),))


def last_complete(path: Path, required: set[str]) -> tuple[int, list[WorkerSpan]] | None:
    """Return the last step with all ``required`` names and its spans. Reads only the end of a long trace."""
    size = path.stat().st_size if path.is_file() else 0
    tail = FIRST_TAIL
    while size:
        steps: dict[int, list[WorkerSpan]] = {}
        for event in _events(_tail(path, size, tail)):
            span = WorkerSpan(event.name, event.pid, event.ts / 1e6, (event.ts + event.dur) / 1e6)
            steps.setdefault(event.args.step, []).append(span)
        if tail < size and steps:
            del steps[min(steps)]  # its first events may be before the tail
        if complete := [step for step, spans in steps.items() if required <= {span.name for span in spans}]:
            return max(complete), steps[max(complete)]
        if tail >= min(size, MAX_TAIL):
            return None
        tail *= 4
    return None


def _tail(path: Path, size: int, length: int) -> list[bytes]:
    with path.open("rb") as file:
        file.seek(max(0, size - length))
        return file.read(length).splitlines()


def _events(lines: Iterable[bytes]) -> Iterable[TraceEvent]:
    for line in lines:
        record: dict[str, Any] | None = read_object(line.strip().rstrip(b","))
        if record and record.get("ph") == "X" and "/" in str(record.get("name")):
            try:
                event = msgspec.convert(record, TraceEvent)
            except msgspec.ValidationError:
                continue
            if event.pid >= 0 and event.dur >= 0:
                yield event


def activities_of(spans: Sequence[WorkerSpan], instructions: Mapping[str, Instruction], step: int) -> list[Activity]:
    """Return the activities in order of their starts; each follows the last one that ended before it."""
    spans = sorted((span for span in spans if span.name in instructions), key=lambda span: span.start)
    activities: list[Activity] = []
    ended: list[tuple[float, int]] = []  # end and number of activities, in order
    for span in spans:
        start, end = span.start - spans[0].start, span.end - spans[0].start
        position = bisect_right(ended, (start + CLOCK_S, len(spans)))
        after = ended[position - 1][1] if position else None
        activities.append(Activity(span.name.partition("/")[0], step - 1, instructions[span.name], (span.rank,), start,
                                   end, after))  # fmt: skip
        if end > start:
            insort(ended, (end, len(activities) - 1))
    return activities
