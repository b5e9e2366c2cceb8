"""Reads rows with line numbers from JSONL, a JSON list, a JSON object with one list, or Parquet."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from json import JSONDecodeError, JSONDecoder
from pathlib import Path
from typing import Any

from realhf.base.errors import UserError

SUFFIXES = (".jsonl", ".json", ".parquet")
PARQUET_MAGIC = b"PAR1"  # first bytes of a Parquet file
ROW_KEYS = frozenset({"prompt", "question", "messages"})
SPACE = re.compile(r"[ \t\r\n]*")


@dataclass(frozen=True)
class RawRow:
    """A parsed row, or the ``problem`` that prevented it, and its first line (Parquet: the row number)."""

    line: int
    value: Any = None
    problem: str = ""


def read_raw_rows(path: str) -> Iterator[RawRow]:
    """Yield the rows of the data file ``path``; UserError if it is missing, empty, or an invalid JSON document."""
    data = read_file(path)
    if data.startswith(PARQUET_MAGIC):
        yield from (RawRow(number, value) for number, value in enumerate(parquet_rows(path), 1))
        return
    if data.lstrip()[:1] == b"[":
        yield from list_rows(path, decode(path, data), 0)
        return
    lines = [(number, line) for number, line in enumerate(data.split(b"\n"), 1) if line.strip()]
    first = parse_line(*lines[0])
    if first.problem or len(lines) == 1:
        start = list_start(data.decode("utf-8", "replace"))
        if start is not None:
            yield from list_rows(path, decode(path, data), start)
            return
    for number, line in lines:
        yield parse_line(number, line)


def read_file(path: str) -> bytes:
    """Return the bytes of the data file without a byte order mark; UserError if it is missing or empty."""
    if not path:
        raise UserError("dataset.path is not set: give a JSONL file")
    file = Path(path)
    if file.is_dir():
        candidates = sorted(p.name for p in file.iterdir() if p.suffix in SUFFIXES)
        hint = f"it contains {', '.join(candidates[:5])}" if candidates else "it contains no .jsonl file"
        raise UserError(f"dataset.path={path} is a folder; give one file: {hint}")
    if not file.exists():
        raise UserError(f"dataset.path={path}: there is no such file")
    try:
        data = file.read_bytes().removeprefix(b"\xef\xbb\xbf")
    except OSError as error:
        raise UserError(f"dataset.path={path} cannot be read: {error.strerror}") from error
    if not data.strip():
        raise UserError(f"dataset.path={path} is empty")
    return data


def parquet_rows(path: str) -> Iterator[dict[str, Any]]:
    """Yield rows as JSON objects: null cells are omitted, dates are text. UserError if pyarrow is not installed."""
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    except ImportError as error:
        raise UserError(f"{path} is a Parquet file, which requires pyarrow: pip install 'realhf[parquet]'") from error
    try:
        with ParquetFile(path) as file:
            for batch in file.iter_batches():
                for row in batch.to_pylist():
                    yield json.loads(json.dumps({k: v for k, v in row.items() if v is not None}, default=str))
    except (ArrowException, OSError) as error:
        raise UserError(f"{path} cannot be read as Parquet: {error}") from error


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
