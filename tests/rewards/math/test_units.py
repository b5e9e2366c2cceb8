"""Products of units in several notations, on numbers and on expressions, against exact sizes."""

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from realhf.rewards.math.equality import same_answer
from tests.scaling import examples

UNITS = {
    "m": ("length", "meters", Fraction(1)), "cm": ("length", "centimeters", Fraction(1, 100)),
    "km": ("length", "kilometers", Fraction(1000)), "s": ("time", "seconds", Fraction(1)),
    "h": ("time", "hours", Fraction(3600)), "min": ("time", "minutes", Fraction(60)),
    "kg": ("mass", "kilograms", Fraction(1000)), "g": ("mass", "grams", Fraction(1)),
}  # fmt: skip
Product = tuple[str, str, int]  # a unit, divided by a power of another one
products = st.tuples(
    st.sampled_from(["m", "cm", "km", "kg", "g"]), st.sampled_from(["s", "h", "min"]), st.integers(1, 3)
)


def written(value: str, product: Product, form: int) -> str:
    over, under, power = product
    exponent = f"^{power}" if power > 1 else ""
    squared = ["", " squared", " cubed"][power - 1]
    return [
        rf"{value}\text{{ {over}/{under}}}{exponent}",
        rf"{value}\ \mathrm{{{over}\,{under}^{{-{power}}}}}",
        rf"{value}\text{{ {over}}}/\text{{{under}}}{exponent}",
        rf"{value}\,\mathrm{{{over}/{under}{exponent}}}",
        rf"{value}\,\mathrm{{{over}\cdot {under}^{{-{power}}}}}",
        rf"{value}\text{{ {UNITS[over][1]} per {UNITS[under][1][:-1]}{squared}}}",
    ][form]


def size(product: Product) -> Fraction:
    return UNITS[product[0]][2] / UNITS[product[1]][2] ** product[2]


@given(st.integers(1, 999), products, products, st.integers(0, 5), st.integers(0, 5), st.sampled_from([1, 1, 7]),
       st.sampled_from(["{}", r"{}\sqrt{{2}}", r"{}\pi"]))  # fmt: skip
@settings(max_examples=examples(150), deadline=None)
def test_products_of_units(
    n: int, product: Product, other: Product, form: int, other_form: int, error: int, value: str
) -> None:
    converted = error * n * size(product) / size(other)
    number = (
        str(converted) if converted.denominator == 1 else rf"\frac{{{converted.numerator}}}{{{converted.denominator}}}"
    )
    same = error == 1 and UNITS[product[0]][0] == UNITS[other[0]][0] and product[2] == other[2]
    gold = written(value.format(number), other, other_form)
    answer = written(value.format(n), product, form)
    if converted.denominator == 1 or value != "{}":
        assert same_answer(answer, gold) is same
    assert same_answer(value.format(n), written(value.format(n), product, form))


@pytest.mark.parametrize("value", ["7", r"3\sqrt{2}", r"\frac{\pi}{2}", "4x"])
@pytest.mark.parametrize(
    ("unit", "other"), [("cm", "kg"), ("cm", "cm^2"), ("m", "s"), ("cm", "m"), ("N", "J"), ("m/s", "m")]
)
def test_other_units_are_other_values(value: str, unit: str, other: str) -> None:
    assert same_answer(rf"{value}\,\mathrm{{{unit}}}", rf"{value}\text{{ {unit}}}")
    assert not same_answer(rf"{value}\,\mathrm{{{other}}}", rf"{value}\text{{ {unit}}}")
    assert not same_answer(rf"{value}\,\mathrm{{{unit}}}", rf"{value}\text{{ {other}}}")


@given(st.integers(1, 12), st.sampled_from([1, 2, 3, 4, 5, 6, 9, 12]))
@settings(max_examples=examples(20), deadline=None)
def test_degrees_and_radians(n: int, d: int) -> None:
    radians, degrees = rf"\frac{{{n}\pi}}{{{d}}}", rf"{180 * n // d}^\circ"
    assert same_answer(degrees, radians) and same_answer(radians, degrees)
    assert same_answer(radians + r"\text{ radians}", radians)
    assert not same_answer(radians + r"^\circ", radians) and not same_answer(radians, radians + r"^\circ")


@pytest.mark.parametrize(
    ("answer", "gold", "same"),
    [
        (r"\$15/\text{hour}", r"15\text{ dollars an hour}", True),
        (r"50\text{ miles}", r"50\text{ miles per hour}", False),
        (r"12\text{ square units}", r"12\text{ cm}^2", True),
        (r"12\text{ units}", r"12\text{ cm}^2", False),
        (r"5\text{ s/s}", r"5\text{ m/s}", False),
        ("5 squared", "5", False),
        (r"5\text{ feet squared}", r"5\text{ ft}^2", True),
        (r"3\text{ apples}", r"3\text{ oranges}", False),
        (r"3\text{ red apples}", r"3\text{ apples}", True),
        (r"2\text{ thousand dollars}", r"\$2000", True),
    ],
)
def test_words(answer: str, gold: str, same: bool) -> None:
    assert same_answer(answer, gold) is same
