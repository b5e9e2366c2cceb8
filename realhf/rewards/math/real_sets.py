r"""Parses sets of real numbers: ``(1,2]\cup[3,\infty)``, ``1<x<2``, ``\mathbb{R}\setminus\{0\}``, ``|x-2|<5``.

Conditions that "and" or a comma joins are intersected.
"""

import math
import re
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import pairwise, product

from realhf.rewards.math.exact_integers import exact_value
from realhf.rewards.math.normalize import split_outside
from realhf.rewards.math.quantities import quantity

REALS = re.compile(
    r"\\mathbb\s*\{?\s*R\s*\}?|\\?R(?![a-zA-Z])|(?i:(?:the\s+set\s+of\s+)?(?:all|every|any)\s+real(?:s|\s+numbers?))"
)
UNION = re.compile(r"\\cup(?![a-z])|\\lor(?![a-z])|\\vee(?![a-z])|\"?\s*\bor\b\s*\"?")
AND = re.compile(r"\\land(?![a-z])|\\wedge(?![a-z])|,?\s*\"?\s*\b(?:and|but)\b\s*\"?|;")
ABSOLUTE = re.compile(r"\|\s*(\d*)\s*([a-z])\s*(?:([+-][^|<>]+))?\|")
REVERSED = re.compile(r"\|\s*([^|<>+-]+)-\s*(\d*\s*[a-z])\s*\|")  # |3-x| equals |x-3|
INTERVAL = re.compile(r"([\[(])(.*)([\])])", re.DOTALL)
WITHOUT = re.compile(r"(?:-|\\(?:setminus|backslash|smallsetminus)(?![a-z]))\s*\\\{(.*)\\\}", re.DOTALL)
SINGLE = re.compile(r"\\\{((?:(?!\\mid)[^,:|])*)\\\}")
COMPARISON = re.compile(r"(<|>|\\le(?![a-z])|\\ge(?![a-z]))")
RELATION = re.compile(r"[<>=]|\\(?:le|ge|ne|in)(?![a-z])")
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
    conditions = [part for joined in AND.split(text) for part in split_outside(joined, ",")]
    if len(conditions) > 1 and any(COMPARISON.search(part) or DIFFERENT.match(part) for part in conditions):
        found = [_condition(part) for part in _with_points(conditions)]
        names = {name for name, _ in found}
        if len(names) > 1 or "" in names:
            return "", []
        intervals = found[0][1]
        for _, others in found[1:]:
            intervals = [both for a, b in product(intervals, others) if (both := _intersection(a, b)) is not None]
        return names.pop(), intervals
    return _condition(text)


def _with_points(conditions: list[str]) -> list[str]:
    r"""Return ``x\ne 1, 2`` as one condition."""
    joined: list[str] = []
    for part in conditions:
        if joined and DIFFERENT.fullmatch(joined[-1]) and not RELATION.search(part):
            joined[-1] += f",{part}"
        else:
            joined.append(part)
    return joined


def _condition(text: str) -> tuple[str, list[Interval]]:
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
    points = [point.replace("\\pm", sign) for point in points for sign in ("", "-")[: 1 + ("\\pm" in point)]]
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
    for side, bound, is_inside in ((parts[0], parts[-1], True), (parts[-1], parts[0], False)):
        if len(parts) == 3 and (match := ABSOLUTE.fullmatch(REVERSED.sub(r"|\2-\1|", side))) is not None:
            return _absolute(match, bound, parts[1] == "\\le", is_inside)
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


def _absolute(match: re.Match[str], bound: str, is_closed: bool, is_inside: bool) -> tuple[str, list[Interval]]:
    r"""Return the intervals of ``|2x-3| < bound``, or of ``bound < |2x-3|``."""
    factor, name, offset = match.groups()
    ends = [f"(-({offset or 0}){sign}({bound}))/{factor or 1}".replace("(+", "(") for sign in "-+"]
    exact = [exact_value(end) for end in ends]
    if exact[0] is not None and exact[1] is not None:
        if exact[0] >= exact[1]:
            return "", []
        ends = [str(value) for value in exact]
    low, high = ends
    if is_inside:
        return name, [_interval(low, high, is_closed, is_closed)]
    return name, [_interval("-\\infty", low, False, is_closed), _interval(high, "\\infty", is_closed, False)]


def _intersection(a: Interval, b: Interval) -> Interval | None:
    """Return the common part of two intervals; None if it is empty or the order of their ends is unknown."""
    low, high = (
        _inner(a.low, a.low_closed, b.low, b.low_closed, 1),
        _inner(a.high, a.high_closed, b.high, b.high_closed, -1),
    )
    if low is None or high is None:
        return None
    first, last = _value(low[0]), _value(high[0])
    if first is not None and last is not None and first >= last and not (first == last and low[1] and high[1]):
        return None
    return Interval(low[0], high[0], low[1], high[1])


def _inner(a: str, a_closed: bool, b: str, b_closed: bool, sign: int) -> tuple[str, bool] | None:
    """Return the larger of two lower ends (``sign`` 1), or the smaller of two upper ends (-1)."""
    for end, other, closed in ((a, b, b_closed), (b, a, a_closed)):
        if end == ("-" if sign > 0 else "") + "\\infty":
            return other, closed
    first, second = _value(a), _value(b)
    if first is None or second is None:
        return None
    if first == second:
        return a, a_closed and b_closed
    return (a, a_closed) if (first > second) == (sign > 0) else (b, b_closed)


def _value(end: str) -> Fraction | float | None:
    """Return the value of an end of an interval, or None for an end that is not a number."""
    if "\\infty" in end:
        return -math.inf if end.startswith("-") else math.inf
    return number.value if (number := quantity(end)) is not None else exact_value(end)
