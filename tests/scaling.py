"""How much the tests try. ``make test-all`` sets TEST_SCALE to 5: more random examples, and every case of a table."""

import os
import random
from collections.abc import Iterable, Mapping
from typing import TypeVar

Case = TypeVar("Case")
Column = TypeVar("Column")
SCALE = int(os.environ.get("TEST_SCALE", "1"))
WHOLE_TABLES = 5


def examples(n: int) -> int:
    """Return the number of examples of a property test."""
    return n * SCALE


def subset(cases: Iterable[Case], n: int) -> list[Case]:
    """Return ``n`` cases of a large table, in its order and always the same; all of them at a large scale."""
    every = list(cases)
    if SCALE >= WHOLE_TABLES:
        return every
    return [every[i] for i in sorted(random.Random(0).sample(range(len(every)), min(n, len(every))))]


def spread(rows: Iterable[Case], columns: Iterable[Column], n: int) -> dict[Case, list[Column]]:
    """Return ``n`` columns for each row of a large table, all columns equally often; all of them at a large scale."""
    every = list(columns)
    n = len(every) if SCALE >= WHOLE_TABLES else min(n, len(every))
    return {row: [every[(number * n + i) % len(every)] for i in range(n)] for number, row in enumerate(rows)}


def pairs(table: Mapping[Case, Iterable[Column]]) -> list[tuple[Case, Column]]:
    """Return the rows and columns of a table."""
    return [(row, column) for row, columns in table.items() for column in columns]
