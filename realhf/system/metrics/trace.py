"""Chrome trace events of a worker's spans. Workers format them, which keeps the master's work per reply small."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

from realhf.base.timers import lanes_of

SpanTuple = tuple[str, int, int]
"""Name, start and duration in microseconds of the wall clock."""
TRACE_BUFFER = 1 << 20  # bytes; flushed after every step
TRACE_END = b'{"name": "end", "ph": "i", "pid": 0, "tid": 0, "ts": 0, "s": "g"}\n]\n'


def open_trace(path: Path, resumed: bool) -> BinaryIO:
    """Open a trace to append events; ``TRACE_END`` completes it. The end of an earlier launch is removed."""
    if not resumed or not path.is_file():
        path.write_bytes(b"[\n")
    trace = path.open("r+b", TRACE_BUFFER)
    size = path.stat().st_size
    trace.seek(max(0, size - TRACE_BUFFER))
    tail = trace.read()
    complete = max(tail.rfind(b",\n"), tail.rfind(b"[\n")) + 2  # a killed master leaves an incomplete line
    trace.seek(size - len(tail) + complete)
    trace.truncate()
    return trace


def trace_lines(spans: Sequence[SpanTuple], rank: int, step: int, concurrent: Sequence[SpanTuple] = ()) -> bytes:
    """Return a trace event per span; those of other processes are in rows below. Steps are displayed from 1."""
    suffix = f', "args": {{"step": {step + 1}}}}},\n'
    lanes = [0] * len(spans) + [1 + lane for lane in lanes_of(concurrent)]
    lines = [
        f'{{"name": {json.dumps(name)}, "ph": "X", "tid": {lane}, "pid": {rank}, "ts": {start}, "dur": {took}{suffix}'
        for lane, (name, start, took) in zip(lanes, [*spans, *concurrent], strict=True)
    ]
    return "".join(lines).encode()
