"""``python -m tests.arch.config_edit_counts [FAMILY ...]`` prints the outcomes of edits of released configurations."""

import sys
import tempfile
from collections import Counter
from pathlib import Path

from tests.arch.released_edits import edits_of, families
from tests.arch.test_released_edits import N_QUICK, ONLY_HERE, outcomes

COLUMNS = ("computed", "refused", "invalid", ONLY_HERE)


def main() -> None:
    total: Counter[str] = Counter()
    print("| family | edits |", " | ".join(COLUMNS), "|\n" + "|---" * (len(COLUMNS) + 2) + "|")
    for family in sys.argv[1:] or families():
        with tempfile.TemporaryDirectory() as folder:
            counts = outcomes(family, range(N_QUICK + len(edits_of(family))), Path(folder))
        total += counts
        print_row(family, counts)
    print_row("all", total)


def print_row(name: str, counts: Counter[str]) -> None:
    print(
        f"| {name} | {sum(counts.values())} |", " | ".join(str(counts[column]) for column in COLUMNS), "|", flush=True
    )


if __name__ == "__main__":
    main()
