r"""Parses units of measurement: ``m/s^2``, ``m s^{-2}``, ``square inches``, ``miles per hour``, ``apples``."""

import re
from collections import Counter
from dataclasses import dataclass
from fractions import Fraction

POWERS = {"square": 2, "cubic": 3}
CURRENCIES = {"usd": "dollar", "eur": "euro", "gbp": "pound", "jpy": "yen", "inr": "rupee"}
NAMES = CURRENCIES | {
    "mm": "millimeter", "cm": "centimeter", "m": "meter", "km": "kilometer", "sq": "square", "cu": "cubic",
    "foot": "ft", "feet": "ft", "yard": "yd", "mile": "mi", "mg": "milligram", "g": "gram", "kg": "kilogram",
    "lb": "pound", "ounce": "oz", "ml": "milliliter", "l": "liter", "s": "second", "sec": "second", "min": "minute",
    "h": "hour", "hr": "hour", "mph": "mi/hour", "kmh": "kilometer/hour", "kph": "kilometer/hour", "metre": "meter",
    "centimetre": "centimeter", "kilometre": "kilometer", "millimetre": "millimeter", "litre": "liter", "hrs": "hour",
    "gal": "gallon", "mins": "minute", "secs": "second", "lbs": "pound",
    "n": "newton", "j": "joule", "w": "watt", "v": "volt", "pa": "pascal", "hz": "hertz", "rad": "radian",
}  # fmt: skip
SIZES = {  # of units, in a unit of the same kind
    **{f"{prefix}{unit}": (unit, Fraction(size)) for unit in ("meter", "gram", "liter")
       for prefix, size in (("milli", "1/1000"), ("centi", "1/100"), ("", "1"), ("kilo", "1000"))},
    "inch": ("ft", Fraction(1, 12)), "ft": ("ft", Fraction(1)), "yd": ("ft", Fraction(3)), "mi": ("ft", Fraction(5280)),
    "second": ("second", Fraction(1)), "minute": ("second", Fraction(60)), "hour": ("second", Fraction(3600)),
    "day": ("second", Fraction(86400)), "week": ("second", Fraction(604800)),
    "cent": ("dollar", Fraction(1, 100)), "dollar": ("dollar", Fraction(1)),
    "unit": ("unit", Fraction(1)),
}  # fmt: skip
FILLERS = frozenset([
    "the", "a", "an", "of", "in", "is", "are", "was", "were", "there", "it", "he", "she", "they", "total",
    "exactly", "about", "each", "all", "hundred", "thousand", "million", "billion", "trillion", "dozen",
])  # fmt: skip
WORD = re.compile(r"[^\W\d_]+")
TOKEN = re.compile(r"(/|\b(?:per|an?)\b)|([^\W\d_]+)[\s\"]*(?:\^\s*\{?\s*(-?[1-9])\s*\}?)?")
POWER_WORD = re.compile(rf"\b({'|'.join([*NAMES, *SIZES])})(e?s)?\s+(squared|cubed)\b")


@dataclass(frozen=True)
class Unit:
    """Known units with their exponents, their size in base units, and other words in the singular."""

    base: frozenset[tuple[str, int]] = frozenset()
    size: Fraction = Fraction(1)
    words: frozenset[str] = frozenset()

    def __bool__(self) -> bool:
        return bool(self.base or self.words)


def with_exponents(text: str) -> str:
    """Return ``second^2`` for ``second squared``."""
    return POWER_WORD.sub(lambda match: f"{match[1]}^{2 if match[3] == 'squared' else 3}", text)


def parse_unit(text: str) -> Unit:
    """Return the unit of the words next to a number; what follows ``/`` or ``per`` divides."""
    exponents: Counter[str] = Counter()
    size, words, sign, power = Fraction(1), set(), 1, 1
    for match in TOKEN.finditer(WORD.sub(lambda word: _name(word.group().lower()), text)):
        divides, name, exponent = match.groups()
        if divides:
            sign = -1 if exponents or divides in ("/", "per") else 1
        elif name in POWERS:
            power = POWERS[name]
        elif name in SIZES:
            base, unit_size = SIZES[name]
            exponents[base] += (total := sign * power * int(exponent or 1))
            size, power = size * unit_size**total, 1
        else:
            words.add(name)
    return Unit(frozenset(exponents.items()), size, frozenset(words) - FILLERS)


def conversion(given: Unit, gold: Unit) -> Fraction | None:
    """Return the factor from one unit to another; None for different kinds.

    A unit that says less than the other is of the same kind, and ``square units`` is any unit of area.
    """
    is_subset = given.words <= gold.words or gold.words <= given.words
    if not (given.base and gold.base):
        names = [unit.words | {name for name, _ in unit.base} for unit in (given, gold)]
        return Fraction(1) if names[0] <= names[1] or names[1] <= names[0] else None
    if any(name == "unit" for name, _ in given.base | gold.base):
        powers = [sum(power for _, power in unit.base) for unit in (given, gold)]
        return Fraction(1) if powers[0] == powers[1] and is_subset else None
    return given.size / gold.size if given.base == gold.base and is_subset else None


def _name(word: str) -> str:
    if word.endswith(("ches", "shes", "xes", "sses")):
        singular = word[:-2]
    else:
        singular = word[:-1] if len(word) > 3 and word.endswith("s") else word
    return NAMES.get(singular, singular)
