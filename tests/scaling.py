"""Number of hypothesis examples: multiplied by HYPOTHESIS_SCALE, which ``make test-random`` sets."""

import os


def examples(n: int) -> int:
    return n * int(os.environ.get("HYPOTHESIS_SCALE", "1"))
