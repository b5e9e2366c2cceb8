"""What a worker tells of its time. It finds the words itself: a master of thousands of workers only files them."""

import json
from collections.abc import Iterable

SpanTuple = tuple[str, int, int]
"""Name, start and duration in microseconds of the wall clock."""

MOVES = ("Transfer", "Reallocate")


def trace_lines(spans: Iterable[SpanTuple], rank: int, step: int) -> bytes:
    """Return an element of the list that a Chrome trace is for every span; they show the step counted from one."""
    rest = f', "args": {{"step": {step + 1}}}}},\n'
    lines = [
        f'{{"name": {json.dumps(name)}, "ph": "X", "tid": 0, "pid": {rank}, "ts": {start}, "dur": {took}{rest}'
        for name, start, took in spans
    ]
    return "".join(lines).encode()


def time_by_metric(spans: Iterable[SpanTuple]) -> dict[str, int]:
    """Return the microseconds that belong to each metric of time; most of what a worker does belongs to none."""
    found: dict[str, int] = {}
    for name, _, took in spans:
        mfc, _, instruction = name.partition("/")
        if metric := f"time/{mfc}_s" if instruction == "Compute" else "time/move_s" if instruction in MOVES else "":
            found[metric] = found.get(metric, 0) + took
    return found
