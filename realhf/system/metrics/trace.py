"""Chrome trace events of a worker's spans. Workers format them, which keeps the master's work per reply small."""

import json
from collections.abc import Iterable

SpanTuple = tuple[str, int, int]
"""Name, start and duration in microseconds of the wall clock."""


def trace_lines(spans: Iterable[SpanTuple], rank: int, step: int) -> bytes:
    """Return a trace event per span. Steps are displayed from 1."""
    suffix = f', "args": {{"step": {step + 1}}}}},\n'
    lines = [
        f'{{"name": {json.dumps(name)}, "ph": "X", "tid": 0, "pid": {rank}, "ts": {start}, "dur": {duration}{suffix}'
        for name, start, duration in spans
    ]
    return "".join(lines).encode()
