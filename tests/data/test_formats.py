"""Every format gives the rows that were written, and a wrong one is reported once, with the remedy."""

import csv
import gzip
import io
import json
import random
from pathlib import Path
from typing import Any

import pytest

from realhf.api.config import DatasetConfig
from realhf.api.experiment import Task
from realhf.base.data_files import select_files
from realhf.base.errors import UserError
from realhf.data.files import read_raw_rows
from realhf.data.rows import read_rows

pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
Rows = list[dict[str, Any]]
TEXTS = ["1+1=", "a,b", 'quo"te', "line\nbreak", "\u2028 sep", "tab\t", "\U0001f600", "{}", "[1]", " x ", "\r\n"]


def rows_of(seed: int) -> Rows:
    dice = random.Random(seed)
    return [{"prompt": f"{i} {dice.choice(TEXTS)}", "answer": dice.choice(TEXTS)} for i in range(dice.randrange(1, 60))]


def jsonl(rows: Rows) -> bytes:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


def table(rows: Rows, delimiter: str) -> bytes:
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, list(rows[0]), delimiter=delimiter)
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue().encode()


def arrow(rows: Rows, kind: str) -> bytes:
    import pyarrow.ipc
    import pyarrow.parquet

    sink, data = pa.BufferOutputStream(), pa.Table.from_pylist(rows)
    if kind == "parquet":
        pyarrow.parquet.write_table(data, sink, row_group_size=7)
    else:
        with getattr(pyarrow.ipc, f"new_{kind}")(sink, data.schema) as writer:
            writer.write_table(data, max_chunksize=5)
    return sink.getvalue().to_pybytes()


FORMATS = {
    "jsonl": jsonl,
    "json": lambda rows: json.dumps(rows, indent=1).encode(),
    "bom.jsonl": lambda rows: b"\xef\xbb\xbf" + jsonl(rows),
    "csv": lambda rows: table(rows, ","),
    "tsv": lambda rows: table(rows, "\t"),
    "parquet": lambda rows: arrow(rows, "parquet"),
    "file.arrow": lambda rows: arrow(rows, "file"),
    "stream.arrow": lambda rows: arrow(rows, "stream"),
}
PACKED = {"": bytes, ".gz": gzip.compress, ".zst": lambda data: pa.compress(data, "zstd", asbytes=True)}


def read(path: Path, **options: Any) -> Rows:
    return [row.fields for row in read_rows(DatasetConfig(path=str(path), **options), Task.sft).rows]


@pytest.mark.parametrize("packed", PACKED)
@pytest.mark.parametrize("kind", FORMATS)
def test_every_format_gives_the_rows_that_were_written(tmp_path: Path, kind: str, packed: str) -> None:
    for seed in range(10):
        rows = rows_of(seed)
        file = tmp_path / f"d.{kind}{packed}"
        file.write_bytes(PACKED[packed](FORMATS[kind](rows)))
        assert read(file) == rows, f"seed {seed}"
        if not kind.endswith("sv"):  # the suffix of others is not needed
            assert read(file.rename(tmp_path / "d")) == rows, f"seed {seed}"


@pytest.mark.parametrize("packed", [".gz", ".zst"])
@pytest.mark.parametrize("kind", ["jsonl", "json", "csv", "parquet", "stream.arrow"])
def test_a_truncated_file_is_one_problem(tmp_path: Path, kind: str, packed: str) -> None:
    """Never a part of the rows without a message."""
    dice, rows = random.Random(kind + packed), rows_of(3)
    data = PACKED[packed](FORMATS[kind](rows))
    for _ in range(30):
        file = tmp_path / f"d.{kind}{packed}"
        file.write_bytes(data[: dice.randrange(8, len(data))])
        with pytest.raises(UserError) as caught:
            read(file)
        assert len(caught.value.problems) <= 2 and str(file) in str(caught.value)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (jsonl(rows_of(1)).decode().encode("utf-16"), "iconv -f UTF-16"),
        (jsonl(rows_of(1)).decode().encode("utf-16-le"), "iconv -f UTF-16"),
        (table(rows_of(1), ","), "CSV, with .csv as suffix"),
        (b"BZh91AY", "bzip2"),
        (b"\xfd7zXZ\x00", "xz"),
        (b"PK\x03\x04", "ZIP"),
        (b"\x80\x04\x95", "pickle"),
        (b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
        (b"<html>\n<body>\n", "not JSON Lines"),
        (gzip.compress(b"", mtime=0), "is empty"),
        (b"[" * 100_000, "d.jsonl:1: not JSON: nested too deeply"),
        (b'[{"prompt": "a"},\n{"prompt": ' + b"[" * 100_000 + b"\n", "d.jsonl:2: not JSON: nested too deeply"),
    ],
)
def test_a_wrong_format_is_reported_once_with_the_remedy(tmp_path: Path, data: bytes, words: str) -> None:
    file = tmp_path / "d.jsonl"
    file.write_bytes(data)
    with pytest.raises(UserError, match=words) as caught:
        read(file)
    assert len(caught.value.problems) == 1


@pytest.mark.parametrize("columns", [("instruction", "output"), ("query", "response"), ("promt", "anser")])
def test_missing_columns_are_reported_once_and_the_suggested_names_work(
    tmp_path: Path, columns: tuple[str, str]
) -> None:
    file = tmp_path / "d.jsonl"
    file.write_bytes(jsonl([{columns[0]: f"p{i}", columns[1]: "a"} for i in range(30)]))
    with pytest.raises(UserError, match=f"dataset.columns={{{columns[0]}: prompt}}") as caught:
        read(file)
    assert len(caught.value.problems) == 2  # and that no row is usable
    names = {columns[0]: "prompt"}
    with pytest.raises(UserError, match=f"dataset.columns={{{columns[1]}: answer}}"):
        read(file, columns=names)
    assert read(file, columns={**names, columns[1]: "answer"})[7] == {"prompt": "p7", "answer": "a"}
    with pytest.raises(UserError, match="gives several columns the name prompt"):
        read(file, columns=dict.fromkeys(columns, "prompt"))


@pytest.mark.parametrize("task", [Task.prompt, Task.answer, Task.math, Task.sft])
def test_rows_of_gsm8k_suit_every_kind_of_reward(tmp_path: Path, task: Task) -> None:
    file = tmp_path / "d.jsonl"
    file.write_bytes(jsonl([{"question": "2+2?", "answer": "<<2+2=4>>4\n#### 4"}]))
    (row,) = read_rows(DatasetConfig(path=str(file)), task).rows
    assert row.fields["prompt"] == "2+2?"


def test_lines_are_read_one_after_another(tmp_path: Path) -> None:
    file = tmp_path / "d.jsonl"
    file.write_bytes(b'{"prompt": "a"}\n' * 3 + b'{"prompt": "' + b"x" * (1 << 20))
    rows = read_raw_rows(str(file))
    assert [next(rows).value for _ in range(3)] == [{"prompt": "a"}] * 3
    assert next(rows).problem


@pytest.mark.parametrize("seed", range(200))
def test_a_selection_is_the_same_among_all_files_and_among_the_chosen_ones(seed: int) -> None:
    """So that what is downloaded is what is read."""
    dice = random.Random(seed)
    folders, splits = ["", "main/", "extra/", "data/"], ["train", "test", "dev", "validation", "part"]
    endings = [".jsonl", "-00000-of-00002.parquet", "-00001-of-00002.parquet", ".csv.gz", ".json", ".txt"]
    names = sorted({dice.choice(folders) + dice.choice(splits) + dice.choice(endings) for _ in range(6)})
    listed = dice.choice(["train*", "main/*", "**/test*", "data"])
    card = f"---\nconfigs:\n- config_name: main\n  data_files: '{listed}'\n---\n" if seed % 2 else ""
    config, split = dice.choice(["", "main"]), dice.choice(["", "train", "test"])
    try:
        chosen = select_files(names, card, config, split)
    except ValueError:
        return
    assert chosen and set(chosen) <= set(names)
    others = [name for name in names if name not in chosen and dice.random() < 0.5]
    assert select_files(chosen, card, config, split) == chosen
    assert card == "" or select_files([*chosen, *others], card, config, split) == chosen


def test_shards_are_numbered_consecutively(tmp_path: Path) -> None:
    for i in range(3):
        (tmp_path / f"train-0000{i}.jsonl").write_bytes(jsonl([{"prompt": f"{i}", "answer": "a"}] * 2))
    found = read_rows(DatasetConfig(path=str(tmp_path)), Task.sft).rows
    assert [(row.line, row.fields["prompt"]) for row in found] == [(k + 1, str(k // 2)) for k in range(6)]
