"""Reads JSONL, a JSON list, a JSON object that holds one list, or Parquet, and knows where every row stands."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from json import JSONDecodeError, JSONDecoder
from pathlib import Path
from typing import Any

from realhf.base.errors import UserError
from realhf.data.parquet import MAGIC, parquet_rows

SUFFIXES = (".jsonl", ".json", ".parquet")
ROW_KEYS = frozenset({"prompt", "question", "messages"})
SPACE = re.compile(r"[ \t\r\n]*")


@dataclass(frozen=True)
class RawRow:
    """A row as it stands in the file, from a line on (of Parquet: its number); ``problem`` says why it has no value."""

    line: int
    value: Any = None
    problem: str = ""


def read_raw_rows(path: str) -> Iterator[RawRow]:
    """Yield the rows of the data file ``path``; UserError when it is missing, empty, or a broken JSON document."""
    data = read_file(path)
    if data.startswith(MAGIC):
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
    """Return the bytes of the data file without a byte order mark; UserError when there is nothing to read."""
    if not path:
        raise UserError("dataset.path is not set: name a JSONL file")
    file = Path(path)
    if file.is_dir():
        inside = sorted(p.name for p in file.iterdir() if p.suffix in SUFFIXES)
        hint = f"it holds {', '.join(inside[:5])}" if inside else "it holds no .jsonl file"
        raise UserError(f"dataset.path={path} is a folder, name one file: {hint}")
    if not file.exists():
        raise UserError(f"dataset.path={path}: there is no such file")
    try:
        data = file.read_bytes().removeprefix(b"\xef\xbb\xbf")
    except OSError as error:
        raise UserError(f"dataset.path={path} cannot be read: {error.strerror}") from error
    if not data.strip():
        raise UserError(f"dataset.path={path} is empty")
    return data


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
    decoder, line, seen = JSONDecoder(), 1, 0
    at = skip_space(text, skip_space(text, start) + 1)
    try:
        while text[at : at + 1] != "]":
            line, seen = line + text.count("\n", seen, at), at
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
    """Return where the one list of a JSON object begins, or None when the text is not such an object or is a row."""
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
    assert match is not None, "the pattern matches nothing too"
    return match.end()
