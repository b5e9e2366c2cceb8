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


def time_spent(spans: Iterable[SpanTuple]) -> tuple[int, int]:
    """Return the microseconds spent on moving and on computing; most of what a worker does counts as neither."""
    moved = computed = 0
    for name, _, took in spans:
        instruction = name.partition("/")[2]
        if instruction == "Compute":
            computed += took
        elif instruction in MOVES:
            moved += took
    return moved, computed
