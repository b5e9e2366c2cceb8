r"""Parses numbers in answers: ``1,234``, ``-3/4``, ``\frac{3}{4}``, ``1 1/2``, ``6\times 10^5``, ``50%``, ``5 km``.

Values are exact fractions. Variables are not supported: ``5 apples`` is a quantity, ``5x`` is not.
"""

import re
from dataclasses import dataclass
from enum import Enum
from fractions import Fraction
from itertools import pairwise

from realhf.rewards.math.units import (
    CURRENCIES,
    FILLERS,
    WORD,
    Unit,
    conversion,
    parse_unit,
    with_exponents,
)

TOLERANCE = Fraction(1, 10**6)
MAX_CHARS = 200  # of a quantity; Python itself limits integers to a few thousand digits
DECIMAL = r"(?:[1-9]\d{0,2}(?:,\d{3})+(?:\.\d+)?|\d{1,3}(?:[ ]\d{3})+(?![\d/ ])|\d+(?:\.\d*)?|\.\d+)"
TEN = r"(?:\\times|\\cdot|\*|x)\s*10\s*\^\s*(?:\{\s*(?P<ten>[-+]?\d{1,3})\s*\}|(?P<ten_>[-+]?\d{1,3})(?!\d))"
NUMBER = re.compile(
    rf"""(?:(?P<sign>[-+])\s*)?(?:
      (?:(?P<whole>\d+)\s*)?\\frac\s*\{{\s*(?P<over>-?{DECIMAL})\s*\}}\s*\{{\s*(?P<under>-?{DECIMAL})\s*\}}
    | (?P<whole_>\d+)[ ](?P<over_>\d+)\s*/\s*(?P<under_>\d+)
    | (?P<over__>{DECIMAL})\s*/\s*(?P<under__>{DECIMAL})
    | (?P<plain>{DECIMAL})(?:[eE](?P<e>[-+]?\d{{1,3}})(?![\d.])|\s*{TEN})?
    )\s*(?P<percent>%?)""",
    re.VERBOSE,
)
PARENTHESES = re.compile(r"^(-?)\(\s*([^()+,-][^(),]*)\)$")
PROSE_MARKS = frozenset(" .,:;?'\"/()-")
QUOTED = re.compile(r'"[^"]*"(?:\s*/\s*[A-Za-z]+(?![A-Za-z(]))?')
RATE = re.compile(r"\b(?:k?m|mi|ft|k?g)/(?:s|h|hr|l|L)\b")
STRAY = re.compile(r"-(?![A-Za-z])")
POWER_OF_UNIT = re.compile(r"(?<=[A-Za-z\"])\s*\^\s*(?:\{\s*-?[123]\s*\}|-?[123])(?!\d)")
INCH = re.compile(r"^\W*in\b(?=[\W\d]*$)")
UNITS = frozenset([
    "mm", "cm", "km", "mg", "kg", "ml", "dl", "oz", "lb", "lbs", "ft", "yd", "mi", "hr", "hrs", "min", "mins",
    "sec", "secs", "ms", "hz", "khz", "kw", "mph", "kmh", "kph", "pm", "am", "us", "usd", "eur", "gb", "mb", "kb",
])  # fmt: skip
SHORT_WORDS = frozenset(["is", "of", "in", "at", "to", "be", "so", "he", "we", "it", "by", "an", "up", "a"])
NEGATION = re.compile(r"n(?:o|ot|or|ever|either)|cannot|(?:is|are|was|does|do)n")
OTHER_VALUE = frozenset([  # words next to a number that change its value, or make it no number, as negations do
    "or", "except", "than", "least", "most", "below", "above", "between", "half", "halves", "third", "thirds", "fourth",
    "fourths", "quarter", "quarters", "fifth", "fifths", "tenth", "tenths", "hundredth", "hundredths",
    "thousandth", "thousandths", "score", "percent", "twice", "double", "triple", "divided", "multiplied", "plus",
    "minus", "negative", "squared", "cubed", "sqrt", "root", "factorial", "mod", "pi", "sin", "cos", "tan", "cot",
    "csc", "log", "exp", "lim", "inf", "infinity", "arctan", "arcsin", "arccos", "cis", "gcd",
    "lcm", "ceil", "floor", "reciprocal", "inverse", "opposite", "undefined", "abc", "xyz",
])  # fmt: skip
MULTIPLES = {"hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12, "dozen": 12}
VERBS = frozenset([  # a number after one of these is a value, for any subject: "Sam has 3"
    "is", "are", "was", "were", "be", "equals", "equal", "has", "have", "had", "gets", "get", "got", "costs", "cost",
    "needs", "need", "takes", "took", "makes", "made", "spends", "spent", "earns", "earned", "sells", "sold", "eats",
    "ate", "pays", "paid", "saves", "saved", "buys", "bought", "collects", "collected", "contains", "remain", "remains",
    "left", "leaves", "gives", "gave", "drinks", "drank", "uses", "used", "weighs", "becomes", "only",
])  # fmt: skip
LABELS = frozenset([
    "answer", "final", "result", "value", "sum", "product", "so", "thus", "hence", "therefore", "approximately",
    "around", "roughly", "just", "us", "rs", "nearly", "altogether", "number", *CURRENCIES,
])  # fmt: skip


Form = Enum("Form", ("integer", "decimal", "ratio", "mixed"))


@dataclass(frozen=True)
class Quantity:
    """A value as written, without its percent sign."""

    value: Fraction
    form: Form
    is_percent: bool = False
    unit: Unit = Unit()


def quantity(text: str) -> Quantity | None:
    """Return the only number in a text in normal notation, alone or among words; None for any other text."""
    if len(text) > MAX_CHARS or not any(char.isdigit() for char in text):
        return None
    bare = PARENTHESES.sub(r"\1\2", text)
    if (match := NUMBER.fullmatch(bare)) is not None:
        return _read(match)
    return _among_words(text)


def _read(match: re.Match[str]) -> Quantity | None:
    def part(name: str) -> str | None:
        values = (match.group(key) for key in (name, f"{name}_", f"{name}__") if key in match.re.groupindex)
        return next((value for value in values if value is not None), None)

    whole, over, under, plain = part("whole"), part("over"), part("under"), match.group("plain")
    if over is not None and under is not None:
        if not (divisor := _decimal(under)):
            return None
        value = (_decimal(whole) if whole else 0) + _decimal(over) / divisor
        form = Form.mixed if whole else Form.ratio
    else:
        value = _decimal(plain) * Fraction(10) ** int(match.group("e") or part("ten") or 0)
        form = Form.decimal if "." in plain or match.group("e") or part("ten") else Form.integer
    return Quantity(-value if match.group("sign") == "-" else value, form, bool(match.group("percent")))


def _decimal(digits: str) -> Fraction:
    return Fraction(digits.replace(",", "").replace(" ", "").rstrip("."))


def _among_words(text: str) -> Quantity | None:
    """Parse ``18 dollars``; None for a second number, an operator, a variable or a word that changes the value."""
    text = with_exponents(text)
    with_powers, text = text, POWER_OF_UNIT.sub(lambda m: " " * len(m.group()), text)
    numbers = [m for m in NUMBER.finditer(text) if any(char.isdigit() for char in m.group())]
    if len(numbers) > 1:
        return _sum_of_units(with_powers, [m.start() for m in numbers])
    if len(numbers) != 1 or (read := _read(numbers[0])) is None:
        return None
    before, after = text[: numbers[0].start()], text[numbers[0].end() :]
    if STRAY.search(after) or after.startswith("'") or (before + after).count("(") != (before + after).count(")"):
        return None
    if before and (before[-1].isalnum() or before[-1] in "_^\\-.") or not _is_prose(before) or not _is_prose(after):
        return None
    attached = WORD.match(after)
    if attached and not numbers[0].group().endswith(" ") and attached.group().lower() not in UNITS:
        return None
    if "," in numbers[0].group() and before.endswith("(") and after.startswith(")"):
        return None  # a point
    if not _introduces_value(before):
        return None
    words = [word.lower() for word in WORD.findall(after)]
    value = read.value
    if words and words[0] in MULTIPLES:
        value *= MULTIPLES[words.pop(0)]
    if any(word in MULTIPLES for word in words):
        return None
    currency = " ".join(word for word in WORD.findall(before.lower()) if word in CURRENCIES)
    unit = parse_unit(f"{currency} {INCH.sub(' inch ', with_powers[numbers[0].end() :])}")
    return Quantity(value, read.form, read.is_percent, unit)


def _sum_of_units(text: str, starts: list[int]) -> Quantity | None:
    """Parse ``1 hour 30 minutes``: numbers with smaller and smaller units of one kind."""
    pieces = [text[start:end] for start, end in zip(starts, [*starts[1:], len(text)], strict=True)]
    parts = [quantity(re.sub(r'[\s",]*(?:\band\b)?[\s"]*$', "", piece)) for piece in pieces]
    units = [part.unit for part in parts if part is not None]
    if starts[0] > 0 or len(units) < len(parts) or len({unit.base for unit in units}) != 1 or not units[0].base:
        return None
    if any(unit.words for unit in units) or any(small.size >= large.size for large, small in pairwise(units)):
        return None
    value = sum((part.value * part.unit.size for part in parts if part is not None), Fraction(0))
    return Quantity(value, Form.decimal, unit=Unit(units[0].base))


def _introduces_value(before: str) -> bool:
    """Return True if the words before a number say that it is the value: ``a total of``, ``answer:``, ``Sam has``."""
    words = [word.lower() for word in WORD.findall(before)]
    is_known = set(words) <= VERBS | LABELS | FILLERS | {"per"}
    return is_known or words[-1] in VERBS or before.rstrip().endswith((":", ","))


def _is_prose(text: str) -> bool:
    """Return True if ``text`` is words that do not change the value of a number next to them."""
    if not all(char.isalpha() or char in PROSE_MARKS for char in text):
        return False
    units = set(WORD.findall(" ".join([*QUOTED.findall(text), *RATE.findall(text)])))
    for word in WORD.findall(text):
        known = word in units or word.lower() in UNITS or word.lower() in SHORT_WORDS
        is_other = word.lower() in OTHER_VALUE or NEGATION.fullmatch(word.lower())
        if is_other or not (known or len(word) > 2):
            return False
    return True


def same_quantity(given: Quantity, gold: Quantity) -> bool:
    """Return True if the given number equals the gold one.

    Integers and fractions must be equal; if either is decimal, six decimals are compared. Units are compared if both
    have one. ``50%`` equals ``50`` and ``0.5``; ``50`` equals ``50%`` but not ``0.5``. ``170/2`` does not answer 85: it
    may repeat the question.
    """
    if (factor := conversion(given.unit, gold.unit)) is None:
        return False
    if given.is_percent != gold.is_percent and (given.unit or gold.unit):
        return False
    number = given.value * factor
    is_exact = Form.decimal not in (given.form, gold.form) and given.is_percent == gold.is_percent

    def same(value: Fraction, target: Fraction) -> bool:
        if is_exact or (value.denominator == 1 and target.denominator == 1):
            return value == target
        return abs(value - target) <= TOLERANCE * min(Fraction(1), 100 * abs(target))

    if gold.is_percent and not given.is_percent and same(number, gold.value / 100):
        return True
    if gold.form is Form.integer and given.form is Form.ratio:
        return False  # repeats the question
    if gold.is_percent or not given.is_percent:
        return same(number, gold.value)
    return same(number / 100, gold.value) or (abs(gold.value) > 1 and same(number, gold.value))
