r"""Parses sets of real numbers: ``(1,2]\cup[3,\infty)``, ``1<x<2``, ``\mathbb{R}\setminus\{0\}``, ``x\ne 0``."""

import re
from dataclasses import dataclass, replace
from itertools import pairwise

from realhf.rewards.math.normalize import split_outside
from realhf.rewards.math.quantities import quantity

REALS = re.compile(r"\\math(?:bb|bf)\s*\{?\s*R\s*\}?|\\R(?![a-z])|(?i:(?:the\s+set\s+of\s+)?all\s+real\s+numbers)")
UNION = re.compile(r"\\cup(?![a-z])|\\lor(?![a-z])|\\vee(?![a-z])|\"?\s*\bor\b\s*\"?")
INTERVAL = re.compile(r"([\[(])(.*)([\])])", re.DOTALL)
WITHOUT = re.compile(r"(?:-|\\(?:setminus|backslash|smallsetminus)(?![a-z]))\s*\\\{(.*)\\\}", re.DOTALL)
SINGLE = re.compile(r"\\\{([^,]*)\\\}")
COMPARISON = re.compile(r"(<|>|\\le(?![a-z])|\\ge(?![a-z]))")
DIFFERENT = re.compile(r"([a-z])\s*\\ne(?![a-z])\s*(.+)", re.DOTALL)
BUILDER = re.compile(
    r"\\\{\s*([a-z])\s*(?:\\in\s*(?:\\mathbb\s*\{?\s*R\s*\}?|\\R)\s*)?(?:\\mid(?![a-z])|\||:)(.*)\\\}", re.DOTALL
)
MEMBER = re.compile(r"^\s*([A-Za-z])\s*\\in(?![a-z])\s*")
VARIABLE = re.compile(r"[a-zA-Z]")


@dataclass(frozen=True)
class Interval:
    """Ends as text; a closed end belongs to the interval."""

    low: str
    high: str
    low_closed: bool
    high_closed: bool


@dataclass(frozen=True)
class RealSet:
    """A union of intervals; ``variable`` is empty if the text does not name one."""

    variable: str
    intervals: tuple[Interval, ...]
    is_plain: bool  # whether the text is one interval in brackets, which may also be a point


def parse_real_set(text: str) -> RealSet | None:
    """Return the set in a text in normal notation, or None."""
    variable, rest = "", text.strip()
    if (builder := BUILDER.fullmatch(rest)) is not None:
        bound = parse_real_set(builder.group(2))
        return None if bound is None or bound.variable != builder.group(1) else replace(bound, variable="")
    if (member := MEMBER.match(rest)) is not None:
        variable, rest = member.group(1), rest[member.end() :]
    found: list[Interval] = []
    parts = [part.strip() for part in UNION.split(rest)]
    for part in parts:
        name, intervals = _part(part)
        if not intervals or (name and variable and name != variable):
            return None
        variable = name or variable
        found += intervals
    is_plain = len(parts) == 1 and not variable and INTERVAL.fullmatch(rest) is not None
    return RealSet(variable, tuple(found), is_plain)


def _part(text: str) -> tuple[str, list[Interval]]:
    """Return the variable and the intervals of one part of a union; no intervals if it is invalid."""
    if (different := DIFFERENT.fullmatch(text)) is not None:
        return different.group(1), _without(split_outside(different.group(2), ","))
    if (reals := REALS.match(text)) is not None:
        rest = text[reals.end() :].strip()
        if not rest:
            return "", _without([])
        excluded = WITHOUT.fullmatch(rest)
        return "", _without(split_outside(excluded.group(1), ",")) if excluded else []
    if (single := SINGLE.fullmatch(text)) is not None:
        return "", [Interval(single.group(1).strip(), single.group(1).strip(), True, True)]
    if (interval := INTERVAL.fullmatch(text)) is not None and not COMPARISON.search(text):
        ends = split_outside(interval.group(2), ",")
        if len(ends) != 2:
            return "", []
        return "", [_interval(ends[0], ends[1], interval.group(1) == "[", interval.group(3) == "]")]
    return _inequality(text)


def _without(points: list[str]) -> list[Interval]:
    """Return the real numbers without some points, or nothing if their order is unknown."""
    values = sorted((number.value, point) for point in points if (number := quantity(point)) is not None)
    if len(values) != len(points) and len(points) > 1:
        return []
    ends = ["-\\infty", *([point for _, point in values] or points), "\\infty"]
    return [_interval(low, high, False, False) for low, high in pairwise(ends)]


def _inequality(text: str) -> tuple[str, list[Interval]]:
    parts = [part.strip() for part in COMPARISON.split(text)]
    if len(parts) not in (3, 5):
        return "", []
    if ">" in parts or "\\ge" in parts:
        if "<" in parts or "\\le" in parts:
            return "", []
        flipped = {">": "<", "\\ge": "\\le"}
        parts = [flipped.get(part, part) for part in reversed(parts)]
    if len(parts) == 5:
        low, first, name, second, high = parts
    elif VARIABLE.fullmatch(parts[0]):
        (name, second, high), low, first = parts, "-\\infty", "<"
    else:
        (low, first, name), second, high = parts, "<", "\\infty"
    if not VARIABLE.fullmatch(name) or re.search(rf"(?<![a-zA-Z\\]){name}(?![a-zA-Z])", low + " " + high):
        return "", []
    return name, [_interval(low, high, first == "\\le", second == "\\le")]


def _interval(low: str, high: str, low_closed: bool, high_closed: bool) -> Interval:
    low, high = (end.replace(" ", "") if "\\infty" in end else end.strip() for end in (low, high))
    return Interval(low, high, low_closed and low != "-\\infty", high_closed and high != "\\infty")
