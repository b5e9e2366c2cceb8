"""Generated answers in several forms: units, boxes, polynomials, powers, arguments of functions, number words."""

from fractions import Fraction

import pytest
import sympy
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from realhf.rewards.math.equality import judge_math
from realhf.rewards.math.extract import extract_answer
from tests.scaling import examples

UNITS = {
    "mm": ("length", Fraction(1, 1000)), "cm": ("length", Fraction(1, 100)), "m": ("length", Fraction(1)),
    "km": ("length", Fraction(1000)), "minutes": ("time", Fraction(60)), "hours": ("time", Fraction(3600)),
    "seconds": ("time", Fraction(1)), "g": ("mass", Fraction(1)), "kg": ("mass", Fraction(1000)),
}  # fmt: skip
units = st.sampled_from(sorted(UNITS))


def same_answer(answer: str, gold: str) -> bool:
    """Compare as a judge does: every response has its own time limit."""
    return judge_math("", rf"\boxed{{{answer}}}", {"solutions": [rf"\boxed{{{gold}}}"]}) == 1.0


@given(st.integers(1, 500), units, units, st.integers(1, 3), st.integers(1, 3), st.sampled_from([1, 10, 100]))
@settings(max_examples=examples(200))
def test_units_are_converted(value: int, unit: str, other: str, power: int, other_power: int, factor: int) -> None:
    (kind, size), (other_kind, other_size) = UNITS[unit], UNITS[other]
    number = factor * value * (size / other_size) ** power
    assume(number.denominator == 1)
    answer = rf"{number}\text{{ {other}}}^{other_power}"
    same = kind == other_kind and power == other_power and factor == 1
    assert same_answer(answer, rf"{value}\text{{ {unit}}}^{power}") is same


@given(st.integers(1, 40), st.integers(0, 59), st.integers(-2, 2))
def test_hours_and_minutes(hours: int, minutes: int, error: int) -> None:
    answer = f"{hours} hours and {minutes} minutes"
    assert same_answer(answer, rf"{60 * hours + minutes + error}\text{{ minutes}}") is (error == 0)


@given(st.lists(st.integers(0, 99), min_size=1, max_size=4), st.sampled_from([" or ", ", ", "$ and $", " then ", " "]))
def test_joined_boxes_are_one_answer(numbers: list[int], joint: str) -> None:
    response = "It is $" + joint.join(rf"\boxed{{{n}}}" for n in numbers) + "$."
    is_joined = joint not in (" then ", " ")
    assert extract_answer(response) == (", ".join(map(str, numbers)) if is_joined else str(numbers[-1]))
    wanted = 1.0 if len(numbers) == 1 or not is_joined else 0.0
    assert judge_math("", response, {"solutions": [f"#### {numbers[-1]}"]}) == wanted


coefficients = st.lists(st.integers(-9, 9), min_size=2, max_size=4)


@given(coefficients, coefficients, st.integers(-2, 2))
@settings(max_examples=examples(15), deadline=None)
def test_polynomials_are_compared_as_sympy_does(a: list[int], b: list[int], error: int) -> None:
    x = sympy.Symbol("x")
    product = sympy.Mul(sympy.Poly(a, x).as_expr(), sympy.Poly(b, x).as_expr(), evaluate=False)
    expanded = sympy.expand(product) + error
    assume(expanded.free_symbols)
    assert same_answer(sympy.latex(product), sympy.latex(expanded)) is (error == 0)


@given(st.integers(2, 9), st.integers(4, 40), st.integers(-1, 1))
def test_thousands_equal_a_power(base: int, exponent: int, error: int) -> None:
    number = base**exponent + error
    assert same_answer(f"{number:,}", f"{base}^{{{exponent}}}") is (error == 0)


@given(st.integers(2, 9), st.integers(1, 9), st.permutations("xtsuw"))
@settings(max_examples=examples(8), deadline=None)
def test_arguments_and_elements_are_bound(a: int, b: int, names: list[str]) -> None:
    x, t, *_ = names
    assert same_answer(f"f({t})={a}{t}+{b}", f"f({x})={a}{x}+{b}")
    assert not same_answer(f"f({t})={a}{x}+{b}", f"f({x})={a}{x}+{b}")
    assert not same_answer(f"g({t})={a}{t}+{b}", f"f({x})={a}{x}+{b}")
    assert same_answer(rf"\{{{t} \mid {t}>{a}\}}", rf"\{{{x} \mid {x}>{a}\}}")
    assert not same_answer(rf"\{{{t} \mid {t}>{a}\}}", rf"\{{{x} \mid {x}\ge {a}\}}")


@pytest.mark.parametrize(
    ("answer", "gold", "same"),
    [
        ("60'", r"60^\circ", False),
        (r"22^\circ 30'", r"22.5^\circ", True),
        (r"\frac{\pi}{3}\text{ radians}", r"60^\circ", True),
        (r"\frac{\pi}{6}", r"60^\circ", False),
        (r"\text{negative eight}", "-8", True),
        (r"\text{two thirds}", r"\frac23", True),
        ("twenty-third", r"\frac{20}{3}", False),
        ("There is no solution.", "no solution", True),
        (r"\frac{3}{4}\,", r"\frac34", True),
        (r"\color{blue}{\large 144}", "144", True),
        ("{1313}_{7}", "1313_7", True),
        (r"\ln\frac{x}{y}", r"\ln x - \ln y", True),
        (r"\sqrt{x^3}", "x^{3/2}", True),
        (r"\sqrt{x^2}", "x", False),
        ("|x|", "x", False),
        ("A, C and D", "ACD", True),
        ("A, C", "ACD", False),
        ("Yes, it is injective", "Yes", True),
        ("Yes, no", "Yes", False),
        (r"\mathbb{R} - \{0\}", r"(-\infty,0)\cup(0,\infty)", True),
        (r"(x,y)=(1,2)\text{ or }(x,y)=(2,1)", "(x,y)=(1,2),(2,1)", True),
        (r"5\text{ feet}", r"5\text{ inches}", False),
        (r"75\text{ cents}", r"\$0.75", True),
        ("x=y", "y=-x", False),
        (r"y=\frac{1}{x}", "xy=1", True),
    ],
)
def test_forms(answer: str, gold: str, same: bool) -> None:
    assert same_answer(answer, gold) is same
