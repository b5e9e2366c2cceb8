"""Parsing and comparison of quantities."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from realhf.rewards.math.normalize import normalize
from realhf.rewards.math.quantities import Quantity, quantity, same_quantity


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("7", 7),
        ("-1,234.50", Fraction(-2469, 2)),
        ("1 234", 1234),
        ("3/4", Fraction(3, 4)),
        ("-(3/4)", Fraction(-3, 4)),
        ("\\frac{-3}{4}", Fraction(-3, 4)),
        ("1 1/2", Fraction(3, 2)),
        ("-2\\frac{1}{2}", Fraction(-5, 2)),
        ("6\\times 10^5", 600_000),
        ("1.5e-3", Fraction(3, 2000)),
        ("18 dollars", 18),
        ("3 million dollars", 3_000_000),
        ("she has about 5 apples (in all)", 5),
        ('60 "km/h"', 60),
        ("5 cm^2", 5),
        ("45min", 45),
    ],
)
def test_quantities(text: str, value: Fraction) -> None:
    found = quantity(text)
    assert found is not None and found.value == value


@pytest.mark.parametrize(
    "text",
    ["", "x", "5x", "5 x", "3xy", "2\\pi", "2 pi", "18m", "85 86", "1,23", "5 or 6", "not 5", "at least 5",
     "5 and a half", "2^3", "27+58", "1/0", "\\frac{1}{0}", "5-", "(5", "n!", "5!", "\\sqrt{2}", "x=5",
     "5 hundred million", "1" * 500],
)  # fmt: skip
def test_other_texts(text: str) -> None:
    assert quantity(text) is None


@pytest.mark.parametrize(
    ("given_text", "gold", "same"),
    [
        ("50%", "50", True),
        ("50", "50%", True),
        ("0.5", "50%", True),
        ("1/4", "25%", True),
        ("50%", "0.5", True),
        ("0.5", "50", False),
        ("1%", "1", False),
        ("5 hours", "5", True),
        ("5 hours", "5 minutes", False),
        ("5 US dollars", "5 dollar", True),
        ("170/2", "85", False),
        ("1000001", "1000000", False),
        ("0.333333", "1/3", True),
        ("0.333", "1/3", False),
        ("0", "1.6e-19", False),
        ("0.0000001", "0", False),
        ("499/998001", "1/2000", False),
    ],
)
def test_same_quantity(given_text: str, gold: str, same: bool) -> None:
    a, b = quantity(normalize(given_text)), quantity(normalize(gold))
    assert a is not None and b is not None and same_quantity(a, b) is same


@given(st.fractions(max_denominator=10**6), st.fractions(max_denominator=10**6))
def test_fractions_are_compared_exactly(a: Fraction, b: Fraction) -> None:
    first, second = quantity(f"{a.numerator}/{a.denominator}"), quantity(f"{b.numerator}/{b.denominator}")
    assert isinstance(first, Quantity) and isinstance(second, Quantity)
    assert same_quantity(first, first) and same_quantity(first, second) is (a == b)


@given(st.decimals(min_value=-(10**6), max_value=10**6, places=4, allow_nan=False))
def test_decimals_are_read_exactly(value: object) -> None:
    found = quantity(f"{value:f}")
    assert found is not None and found.value == Fraction(str(value))
