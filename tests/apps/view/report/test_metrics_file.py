"""Metrics that are read while they are written, with damaged lines and hostile values."""

import json
from pathlib import Path
from typing import Any

import pytest

from realhf.apps.view.report import metrics_file
from realhf.apps.view.report.metrics_file import GrowingFile, MetricsFile, read_object


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "metrics.jsonl"


def append(path: Path, *records: Any, end: str = "\n") -> None:
    with path.open("a") as file:
        file.write("\n".join(json.dumps(record) for record in records) + end)


def test_lines_are_read_once_and_only_when_they_are_complete(path: Path) -> None:
    metrics = MetricsFile(path)
    assert not metrics.update() and metrics.n_steps == 0
    append(path, {"step": 1, "loss": 3.0}, {"step": 2, "loss": 2.0})
    append(path, {"step": 3, "loss": 1.0}, end="")
    assert metrics.update() and metrics.n_steps == 2 and metrics.value("loss") == 2.0
    assert not metrics.update()
    append(path, end="\n")
    assert metrics.update() and metrics.series["loss"].n == 3 and metrics.maximum("loss") == 3.0


def test_a_file_that_a_resumed_run_has_shortened_is_read_again(path: Path) -> None:
    metrics = MetricsFile(path)
    append(path, *({"step": step, "loss": 0.5} for step in range(1, 6)))
    metrics.update()
    path.write_text(path.read_text()[: len(path.read_text()) // 2 + 5])
    append(path, end="\n")
    assert metrics.update() and metrics.n_steps < 5 and metrics.series["loss"].n == metrics.n_steps
    path.unlink()
    assert not metrics.update(), "what has been read stays"


def test_damaged_lines_are_counted_and_left_out(path: Path) -> None:
    path.write_text('{"step": 1, "a": NaN, "b": Infinity, "c": 1}\nno json\n[1]\n{"step": "2"}\n{"a": 1}\n'
                    '{"step": 2, "a": 2, "t": "text", "n": null, "l": [1], "flag": true}\n{"step": 1, "a": 5}\n'
                    '{"step": 3, "a": 1' + "0" * 400 + ', "c": 3}\n{"step": 4, "a": 4}\n\xff\n')  # fmt: skip
    metrics = MetricsFile(path)
    metrics.update()
    assert metrics.n_damaged == 6 and metrics.n_steps == 4
    assert {name: series.n for name, series in metrics.series.items()} == {"a": 2, "b": 0, "c": 2}
    assert metrics.value("b") is None and metrics.typical("a") == 4.0
    assert any("is nan" in span.text for span in metrics.warnings.values())


def test_deeply_nested_and_long_lines(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert read_object(b"[" * 100_000) is None and read_object(b'{"a": ' * 100_000) is None
    monkeypatch.setattr(metrics_file, "MAX_LINE", 64)
    path.write_text('{"step": 1, "x": "' + "y" * 300 + '"}\n{"step": 2, "a": 1}\n' + "z" * 64 + "\n")
    file = GrowingFile(path)
    assert [json.loads(line)["step"] for line in file.lines()] == [2] and file.n_long == 2


def test_metrics_beyond_the_limit_are_counted(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_file, "MAX_METRICS", 3)
    append(path, {"step": 1, **{f"m{i}": i for i in range(10)}})
    metrics = MetricsFile(path)
    metrics.update()
    assert len(metrics.series) == 3 and len(metrics.omitted_names) == 3


def test_warnings_are_merged_over_steps(path: Path) -> None:
    append(path, *({"step": step, "actor_gen/truncated": float(step > 2)} for step in range(1, 6)))
    metrics = MetricsFile(path)
    metrics.update()
    (span,) = metrics.warnings.values()
    assert (span.first, span.last, span.n_steps) == (3, 5, 3) and "100% of the responses" in span.text


def test_metrics_of_some_steps_only_stay_in_order(path: Path) -> None:
    append(
        path, *({"step": step, "loss": step, **({"eval/loss": step} if step % 3 == 0 else {})} for step in range(1, 10))
    )
    metrics = MetricsFile(path)
    metrics.update()
    assert metrics.series["loss"].curve().means.tolist() == list(range(1, 10))
    assert metrics.series["eval/loss"].curve().steps.tolist() == [3, 6, 9]


def test_something_else_than_a_file_is_empty(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").mkdir()
    metrics = MetricsFile(tmp_path / "metrics.jsonl")
    metrics.update()
    assert metrics.series == {}
