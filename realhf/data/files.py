"""Reads rows with line numbers from JSON Lines, JSON, CSV, Parquet or Arrow files, also compressed ones.

The content determines the format, except for CSV, which has a suffix. Lines and batches are read one after another; a
JSON document is read as a whole.
"""

import contextlib
import csv
import gzip
import io
import json
import re
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from json import JSONDecodeError, JSONDecoder
from pathlib import Path
from types import MappingProxyType
from typing import Any

from realhf.base.data_files import data_files, data_format
from realhf.base.errors import UserError

BOM = b"\xef\xbb\xbf"
GZIP, ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
PARQUET, ARROW_FILE, ARROW_STREAM = b"PAR1", b"ARROW1", b"\xff\xff\xff\xff"
UNSUPPORTED = {
    b"\xff\xfe": "is UTF-16; convert it: iconv -f UTF-16 -t UTF-8",
    b"\xfe\xff": "is UTF-16; convert it: iconv -f UTF-16 -t UTF-8",
    b"BZh": "is compressed with bzip2; use gzip or zstd",
    b"\xfd7zXZ": "is compressed with xz; use gzip or zstd",
    b"PK\x03\x04": "is a ZIP archive; unpack it",
    b"\x80": "is a pickle; convert it to JSON Lines, CSV, Parquet or Arrow",
    b"version https://git-lfs": "is a pointer of Git LFS; fetch the file: git lfs pull",
}
"""First bytes of files that are not read, and the remedy."""
SPACES = b" \t\r\n"
MAX_CSV_CELL = 1 << 30
ROW_KEYS = frozenset({"prompt", "question", "messages"})
SPACE = re.compile(r"[ \t\r\n]*")


@dataclass(frozen=True)
class RawRow:
    """A parsed row, or the ``problem`` that prevented it, and its first line (Parquet and Arrow: the row number).

    The lines of several files are numbered consecutively.
    """

    line: int
    value: Any = None
    problem: str = ""


def read_raw_rows(path: str, columns: Mapping[str, str] = MappingProxyType({})) -> Iterator[RawRow]:
    """Yield the rows of a data path with renamed ``columns``; UserError if it is missing, empty or invalid."""
    if not path:
        raise UserError("dataset.path is not set: give a JSONL file")
    try:
        files = data_files(path)
    except ValueError as problem:
        raise UserError(f"dataset.path={path}: {problem}") from problem
    line = 0
    for file in files:
        before = line
        for raw in _file_rows(file):
            line = before + raw.line
            value = renamed(raw.value, columns) if isinstance(raw.value, dict) else raw.value
            yield replace(raw, line=line, value=value)


def renamed(row: dict[str, Any], columns: Mapping[str, str]) -> dict[str, Any]:
    """Return a row with new names of columns, which replace columns that have these names."""
    new = {columns[key]: value for key, value in row.items() if key in columns}
    return {**{key: value for key, value in row.items() if key not in columns}, **new}


def _file_rows(file: Path) -> Iterator[RawRow]:
    if not file.exists():
        raise UserError(f"dataset.path={file}: there is no such file")
    try:
        with _opened(file) as stream:
            start = stream.peek(64)
            if start.startswith(BOM):
                stream.read(len(BOM))
            for magic, remedy in UNSUPPORTED.items():
                if start.startswith(magic):
                    raise UserError(f"dataset.path={file} {remedy}")
            if start.startswith((PARQUET, ARROW_FILE, ARROW_STREAM)):
                yield from (RawRow(number, row) for number, row in enumerate(columnar_rows(file, stream, start), 1))
            elif b"\0" in start:
                raise UserError(f"dataset.path={file} is not text in UTF-8; convert it: iconv -f UTF-16 -t UTF-8")
            elif data_format(file.name) in (".csv", ".tsv"):
                yield from csv_rows(file, stream)
            else:
                yield from json_rows(file, stream)
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"dataset.path={file} cannot be read: {getattr(error, 'strerror', None) or error}") from error


@contextlib.contextmanager
def _opened(file: Path) -> Iterator[io.BufferedReader]:
    """Open a file, decompressed according to its content."""
    with file.open("rb") as raw, contextlib.ExitStack() as stack:
        start, stream = raw.peek(4), raw
        if start.startswith(GZIP):
            stream = io.BufferedReader(stack.enter_context(gzip.GzipFile(fileobj=raw)))  # type: ignore[arg-type]
        elif start.startswith(ZSTD):
            arrow = _import_arrow(file)
            stream = io.BufferedReader(stack.enter_context(arrow.CompressedInputStream(raw, "zstd")))
        yield stream


def _import_arrow(file: Path) -> Any:
    try:
        import pyarrow
        import pyarrow.ipc
        import pyarrow.parquet
    except ImportError as error:
        raise UserError(f"{file} requires pyarrow: pip install 'realhf[parquet]'") from error
    return pyarrow


def columnar_rows(file: Path, stream: io.BufferedReader, start: bytes) -> Iterator[dict[str, Any]]:
    """Yield rows of Parquet or Arrow as JSON objects: null cells are omitted, dates are text."""
    arrow = _import_arrow(file)
    try:
        if not stream.seekable() and not start.startswith(ARROW_STREAM):
            stream = io.BufferedReader(io.BytesIO(stream.read()))  # type: ignore[arg-type]
        if start.startswith(PARQUET):
            batches = arrow.parquet.ParquetFile(stream).iter_batches()
        elif start.startswith(ARROW_FILE):
            reader = arrow.ipc.open_file(stream)
            batches = map(reader.get_batch, range(reader.num_record_batches))
        else:
            batches = arrow.ipc.open_stream(stream)
        for batch in batches:
            for row in batch.to_pylist():
                yield json.loads(json.dumps({k: v for k, v in row.items() if v is not None}, default=str))
    except (arrow.ArrowException, OSError) as error:
        kind = "Parquet" if start.startswith(PARQUET) else "Arrow"
        raise UserError(f"{file} cannot be read as {kind}: {' '.join(str(error).split())}") from error


def csv_rows(file: Path, stream: io.BufferedReader) -> Iterator[RawRow]:
    """Yield the rows of CSV, or of TSV, with a header; all values are text."""
    csv.field_size_limit(MAX_CSV_CELL)
    text = io.TextIOWrapper(stream, encoding="utf-8", newline="")
    reader = csv.DictReader(text, delimiter="\t" if data_format(file.name) == ".tsv" else ",", strict=True)
    line = 2
    try:
        for row in reader:
            is_valid = None not in row and None not in row.values()
            yield RawRow(line, row, "" if is_valid else f"it does not have {len(reader.fieldnames or ())} cells")
            line = reader.line_num + 1
    except (csv.Error, UnicodeDecodeError) as error:
        raise UserError(f"{file}:{line}: not CSV in UTF-8: {error}") from error
    if line == 2:
        raise UserError(f"dataset.path={file} is empty")


def json_rows(file: Path, stream: io.BufferedReader) -> Iterator[RawRow]:
    """Yield the rows of JSON Lines, of a JSON list, or of a JSON object with one list."""
    lines = enumerate(stream, 1)
    number, line = next(((n, text) for n, text in lines if text.strip(SPACES)), (0, b""))
    if not number:
        raise UserError(f"dataset.path={file} is empty")
    first, opening = parse_line(number, line), line.lstrip(SPACES)[:1]
    if first.problem or opening == b"[" or list_start(line.decode("utf-8", "replace")) is not None:
        rest = stream.read()
        data = b"\n" * (number - 1) + line + rest
        is_document = first.problem or not rest.strip(SPACES)
        start = 0 if opening == b"[" else list_start(data.decode("utf-8", "replace")) if is_document else None
        if start is not None:
            yield from list_rows(str(file), decode(str(file), data), start)
            return
        lines = enumerate(data.split(b"\n"), 1)
        if first.problem and not re.search(rb"^[ \t]*\{", data, re.MULTILINE):
            hint = ", with .csv as suffix" if b"," in line else ""
            raise UserError(f"dataset.path={file} is not JSON Lines (it begins with {line.strip()[:40]!r}); give JSON "
                            f"Lines, JSON, CSV{hint}, Parquet or Arrow")  # fmt: skip
    else:
        yield first
    yield from (parse_line(number, line) for number, line in lines if line.strip(SPACES))


def parse_line(number: int, line: bytes) -> RawRow:
    try:
        return RawRow(number, json.loads(line.decode()))
    except UnicodeDecodeError as error:
        return RawRow(number, problem=f"not UTF-8 at byte {error.start + 1}")
    except JSONDecodeError as error:
        return RawRow(number, problem=f"not JSON: {error.msg} (column {error.colno})")
    except RecursionError:
        return RawRow(number, problem="not JSON: nested too deeply")


def decode(path: str, data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise UserError(f"{path}:{line}: not UTF-8") from error


def list_rows(path: str, text: str, start: int) -> Iterator[RawRow]:
    """Yield the elements of the JSON list at ``start``, each with the line on which it begins."""
    decoder, line, counted = JSONDecoder(), 1, 0
    at = skip_space(text, skip_space(text, start) + 1)
    try:
        while text[at : at + 1] != "]":
            line, counted = line + text.count("\n", counted, at), at
            value, at = decoder.raw_decode(text, at)
            yield RawRow(line, value)
            at = skip_space(text, at)
            if text[at : at + 1] == ",":
                at = skip_space(text, at + 1)
            elif text[at : at + 1] != "]":
                raise JSONDecodeError("Expecting ',' delimiter", text, at)
        if start == 0 and text[at + 1 :].strip():
            raise JSONDecodeError("Extra data", text, at + 1)
    except JSONDecodeError as error:
        raise UserError(f"{path}:{error.lineno}: not JSON: {error.msg} (column {error.colno})") from error
    except RecursionError as error:
        raise UserError(f"{path}:{line}: not JSON: nested too deeply") from error


def list_start(text: str) -> int | None:
    """Return the offset of the only list of a JSON object; None if the text is something else or a single row."""
    decoder, starts, at = JSONDecoder(), [], skip_space(text, 0)
    if text[at : at + 1] != "{":
        return None
    try:
        while text[at] != "}":
            key, at = decoder.raw_decode(text, skip_space(text, at + 1))
            at = skip_space(text, at)
            if key in ROW_KEYS or text[at] != ":":
                return None
            start = skip_space(text, at + 1)
            value, at = decoder.raw_decode(text, start)
            at = skip_space(text, at)
            if isinstance(value, list):
                starts.append(start)
    except (JSONDecodeError, IndexError, TypeError, RecursionError):
        return None
    return starts[0] if len(starts) == 1 and not text[at + 1 :].strip() else None


def skip_space(text: str, at: int) -> int:
    match = SPACE.match(text, at)
    assert match is not None, "the pattern matches the empty string"
    return match.end()
