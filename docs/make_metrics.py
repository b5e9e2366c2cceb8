"""Writes docs/reference/metrics.md from the registry of metrics."""

from collections.abc import Iterator
from pathlib import Path

from realhf.system.metrics.descriptions import SECTIONS, MetricPattern

PAGE = Path(__file__).parent / "reference" / "metrics.md"
INTRODUCTION = """# Metrics

Made by `make docs` from the code (`realhf/system/metrics/descriptions.py`). The tests compare the metrics of every run
with this page.

`metrics.jsonl` has one object per step, and TensorBoard the same values. `evaluation.jsonl` has one object per
evaluation: `step`, `seconds`, `metrics`, and `counts`, the number of values of each mean. `{call}` is the name of a
call, such as `actor_gen` (see [graph](../concepts/graph.md)). Metrics of calls are means over the rows, tokens or pairs
of all workers. KL divergences are in nats."""


def lines() -> Iterator[str]:
    yield INTRODUCTION
    for section, patterns in SECTIONS.items():
        yield from ("", f"## {section}", "", "| key | unit | |", "|---|---|---|", *map(row, patterns))


def row(metric: MetricPattern) -> str:
    return f"| `{metric.key}` | {metric.unit} | {metric.text} |"


if __name__ == "__main__":
    PAGE.write_text("\n".join(lines()) + "\n")
