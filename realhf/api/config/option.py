"""Declaration of options with help texts, ranges of numbers, and marks of paths."""

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import Field, dataclass, field, fields, is_dataclass
from math import inf
from typing import Any

from realhf.base.data_files import data_exists


@dataclass(frozen=True)
class Range:
    """An interval of valid numbers; NaN is in none. ``words`` are valid instead of a number."""

    low: float
    high: float
    low_open: bool = False
    high_open: bool = False
    words: tuple[str, ...] = ()

    def violated(self, value: float) -> str:
        """Return the bounds that a number violates, such as ``>= 0``; empty if it is in the range."""
        lower = (value > self.low) if self.low_open else (value >= self.low)
        upper = (value < self.high) if self.high_open else (value <= self.high)
        bounds = {f"{'>' if self.low_open else '>='} {self.low}": lower,
                  f"{'<' if self.high_open else '<='} {self.high}": upper}  # fmt: skip
        return " and ".join(bound for bound, holds in bounds.items() if not holds)

    def __str__(self) -> str:
        interval = f"{'(' if self.low_open else '['}{self.low}, {self.high}{')' if self.high_open else ']'}"
        return " or ".join((interval, *self.words))


@dataclass(frozen=True)
class Words:
    """Valid words of an option that may also be a number or a bool."""

    words: tuple[str, ...]

    def __str__(self) -> str:
        return ", ".join(self.words)


AUTO = "auto"
"""The planner, or a measurement at the start, chooses the value of the option."""
SWITCH_OR_AUTO = Words((AUTO,))
FINITE = Range(-inf, inf, low_open=True, high_open=True)
NON_NEGATIVE = Range(0, inf, high_open=True)
POSITIVE = Range(0, inf, low_open=True, high_open=True)
CAP = Range(0, inf, low_open=True)  # inf: no cap
RATIO_CAP = Range(1, inf)  # of ratios of policies, which are 1 if the policies are equal
FRACTION = Range(0, 1)
PROBABILITY = Range(0, 1, low_open=True)
DECAY = Range(0, 1, high_open=True)
SECONDS = Range(0, 10**6, low_open=True)  # the operating system's waits are limited to 2**31 milliseconds
GIGABYTES = Range(0, 10**6, low_open=True)
COUNT = Range(1, 2**31 - 1)
NATURAL = Range(0, 2**31 - 1)
COUNT_OR_ALL = Range(-1, 2**31 - 1)
SEED = Range(0, 2**63 - 1)
ZERO_STAGE = Range(1, 3, words=(AUTO,))

FILE: Callable[[str], bool] = os.path.isfile
FOLDER: Callable[[str], bool] = os.path.isdir
MODEL: Callable[[str], bool] = os.path.exists  # or ORG/NAME[@revision] on the hub
PATH: Callable[[str], bool] = os.path.exists
PLAN: Callable[[str], bool] = lambda text: text.endswith(".json") and os.path.isfile(text)  # or an allocation string
DATA: Callable[[str], bool] = data_exists  # or ORG/NAME[@revision][:config[:split]] on the hub


def opt(default: Any, text: str, domain: Range | Words | Callable[[str], bool] | None = None) -> Any:
    """Return a dataclass field with a default (or a factory of it) and the text that ``--help`` shows.

    ``domain`` is the range of a number (or of the numbers of a list), or valid words beside True and False. For a path,
    it is the test whether the path exists; then a relative path is stored as an absolute one.
    """
    metadata = {"help": text, "domain": domain}
    if callable(default):
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)


def leaves(options: Any, prefix: str = "") -> Iterator[tuple[str, Field, Any]]:
    """Yield the full name, the field and the value of every option of nested dataclasses, in order of declaration."""
    for option in fields(options):
        key, value = f"{prefix}{option.name}", getattr(options, option.name)
        if is_dataclass(value):
            yield from leaves(value, f"{key}.")
        elif not option.metadata.get("omegaconf_ignore"):
            yield key, option, value


def changed_options(options: Any) -> list[str]:
    """Return the names of options that differ from their defaults."""
    default = {key: value for key, _, value in leaves(type(options)())}
    return [key for key, _, value in leaves(options) if value != default[key]]


def range_problems(values: Iterable[tuple[str, Field, Any]]) -> list[str]:
    """Return one line per option with a number outside its range; numbers without a range must be finite."""
    problems = []
    for key, option, value in values:
        domain = option.metadata.get("domain")
        if isinstance(domain, Words) and isinstance(value, str) and value not in domain.words:
            problems.append(f"{key}={value}: must be True, False or {domain}")
        if isinstance(domain, Range) and domain.words and isinstance(value, str) and value not in domain.words:
            problems.append(f"{key}={value}: must be in {domain}")
        valid = domain if isinstance(domain, Range) else FINITE
        numbers = [x for x in (value if isinstance(value, list) else [value]) if isinstance(x, int | float)]
        if bounds := next(filter(None, map(valid.violated, numbers)), ""):
            problems.append(f"{key}={value}: must be {bounds}")
    return problems
