r"""Parses matrices, also with a factor in front, and vectors: ``(1,2)``, ``\langle 1,2\rangle``, ``3i-4j+k``."""

import re
from dataclasses import dataclass

from realhf.rewards.math.normalize import is_wrapped, split_outside

MATRIX = re.compile(
    r"(?P<factor>(?:(?!\\begin).)*?)\s*(?:\\cdot|\\times)?\s*"
    r"\\begin\{(?P<kind>[pbvBV]?|small)(?:matrix|array)\}(?:\{[lcr| ]*\})?"
    r"(?P<body>(?:(?!\\begin).)*)\\end\{(?P=kind)(?:matrix|array)\}(?P<transposed>\s*\^\s*\{?\s*(?:T|\\top)\s*\}?)?",
    re.DOTALL,
)
FACTOR = re.compile(r"-|[^=<>&,]+")
TERM = re.compile(r"\s*([+-]?)((?:[^+\-{}()]|\{[^{}]*\}|\([^()]*\))*?)(?<![A-Za-z\\])([ijk])\s*(?=[+-]|$)")


@dataclass(frozen=True)
class Matrix:
    """Entries as text; those of a scaled matrix are products that are not evaluated.

    A column without brackets is a vector, which is also written as a tuple.
    """

    rows: tuple[tuple[str, ...], ...]
    is_scaled: bool
    is_determinant: bool
    is_column: bool = False


def matrix_rows(body: str) -> list[str]:
    """Return the rows of a matrix or of a function by cases, without their spacing."""
    rows = [re.sub(r"^\[[^\]]*\]", "", row).strip() for row in body.split("\\\\")]
    return [row for row in rows if row]


def parse_matrix(text: str) -> Matrix | None:
    """Return the matrix in a text in normal notation, or None."""
    inner = text[1:-1].strip() if is_wrapped(text, "([", ")]") else text
    match = MATRIX.fullmatch(inner if inner.startswith("\\begin") else text)
    if match is None or not (match["factor"] == "" or FACTOR.fullmatch(match["factor"])):
        return None
    factor, is_determinant = match["factor"].strip(), match["kind"] in ("v", "V")
    rows = tuple(tuple(split_outside(row, "&")) for row in matrix_rows(match["body"]))
    if factor:
        scale = "-1" if factor == "-" else factor
        rows = tuple(tuple(rf"({scale})\cdot({entry})" for entry in row) for row in rows)
    if match["transposed"] and len({len(row) for row in rows}) == 1:
        rows = tuple(zip(*rows, strict=True))
    is_column = match["kind"] == "" and {len(row) for row in rows} == {1}
    return None if not rows or (factor and is_determinant) else Matrix(rows, bool(factor), is_determinant, is_column)


def unit_vector_components(text: str) -> list[str] | None:
    """Return ``["3", "-4", "1"]`` for ``3i-4j+k``; None unless the text is a sum of at least two unit vectors."""
    found, end = {}, 0
    while (term := TERM.match(text, end)) is not None and term[3] not in found:
        coefficient = term[2].strip() or "1"
        found[term[3]] = f"-{coefficient}" if term[1] == "-" else coefficient
        end = term.end()
    if end < len(text) or len(found) < 2:
        return None
    return [found.get(name, "0") for name in ("ijk" if "k" in found else "ij")]
