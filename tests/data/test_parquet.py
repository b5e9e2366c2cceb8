"""Parquet files give the same rows as JSON lines."""

import datetime
import json
from pathlib import Path
from typing import Any

import pytest

from realhf.api.config import DatasetConfig, OnBadRow
from realhf.api.experiment import Task
from realhf.base.errors import UserError
from realhf.data.rows import read_rows

pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
ROWS = [
    {"prompt": "1+1=", "solutions": ["2"], "level": 3},
    {"prompt": "2+2=", "solutions": ["4", "four"], "level": None},
    {"prompt": [{"role": "user", "content": "3+3="}], "solutions": ["6"]},
]


def write_parquet(folder: Path, rows: list[dict[str, Any]], name: str = "d.parquet", **options: Any) -> str:
    from pyarrow.parquet import write_table

    write_table(pyarrow.Table.from_pylist(rows), folder / name, **options)
    return str(folder / name)


def test_rows_are_those_of_json_lines(tmp_path: Path) -> None:
    rows = ROWS[:2]
    (tmp_path / "d.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    as_lines = read_rows(DatasetConfig(path=str(tmp_path / "d.jsonl")), Task.math)
    from_parquet = read_rows(DatasetConfig(path=write_parquet(tmp_path, rows, row_group_size=1)), Task.math)
    assert [row.fields["prompt"] for row in from_parquet.rows] == ["1+1=", "2+2="] and len(as_lines.rows) == 2
    assert [row.line for row in from_parquet.rows] == [1, 2]
    assert from_parquet.rows[0].fields == as_lines.rows[0].fields and "level" not in from_parquet.rows[1].fields


def test_the_file_name_is_ignored_and_chats_are_read(tmp_path: Path) -> None:
    from_parquet = read_rows(DatasetConfig(path=write_parquet(tmp_path, ROWS[2:], "rows.data")), Task.math)
    as_lines = tmp_path / "d.jsonl"
    as_lines.write_text(json.dumps(ROWS[2]))
    assert from_parquet.rows[0].fields == read_rows(DatasetConfig(path=str(as_lines)), Task.math).rows[0].fields


def test_types_without_json_equivalent_become_text(tmp_path: Path) -> None:
    rows = [{"prompt": "p", "solutions": ["1"], "seen": datetime.date(2026, 1, 2)}]
    from_parquet = read_rows(DatasetConfig(path=write_parquet(tmp_path, rows)), Task.math)
    assert from_parquet.rows[0].fields["seen"] == "2026-01-02"


def test_a_bad_row_is_reported_with_its_number(tmp_path: Path) -> None:
    path = write_parquet(tmp_path, [ROWS[0], {"prompt": "p", "solutions": None}, ROWS[1]])
    from_parquet = read_rows(DatasetConfig(path=path, on_bad_row=OnBadRow.skip), Task.math)
    assert len(from_parquet.rows) == 2 and from_parquet.problems[0].startswith(f"{path}:2: ")


def test_a_truncated_file_is_an_error(tmp_path: Path) -> None:
    path = Path(write_parquet(tmp_path, ROWS[:2]))
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(UserError, match="cannot be read as Parquet"):
        read_rows(DatasetConfig(path=str(path)), Task.math)


def test_without_pyarrow_the_error_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_parquet(tmp_path, ROWS[:1])
    monkeypatch.setitem(__import__("sys").modules, "pyarrow.parquet", None)
    with pytest.raises(UserError, match=r"pip install 'realhf\[parquet\]'"):
        read_rows(DatasetConfig(path=path), Task.math)
