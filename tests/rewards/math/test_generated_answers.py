"""Generated answers against independent definitions: integer arithmetic, number words, sets of reals."""

import itertools
import math
import operator
from collections.abc import Callable
from fractions import Fraction

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from realhf.rewards.math.equality import same_answer
from realhf.rewards.math.exact_integers import exact_value
from realhf.rewards.math.normalize import number_of_words
from tests.scaling import examples

Term = tuple[str, Fraction]
Bounds = tuple[int | None, int | None, bool, bool]
INFINITY, LE, GE = math.inf, r"\le", r"\ge"
numbers = st.integers(0, 50).map(lambda n: (str(n), Fraction(n)))


def combined(terms: st.SearchStrategy[Term]) -> st.SearchStrategy[Term]:
    def operation(a: Term, b: Term, sign: str, n: int) -> Term:
        (x, p), (y, q) = a, b
        if sign in ("/", "frac") and q == 0:
            return a
        return {
            "+": lambda: (f"{x}+{y}", p + q),
            "-": lambda: (f"{x}-({y})", p - q),
            "*": lambda: (f"({x})\\cdot ({y})", p * q),
            "/": lambda: (f"({x})/({y})", p / q),
            "frac": lambda: (f"\\frac{{{x}}}{{{y}}}", p / q),
            "^": lambda: (f"({x})^{{{n}}}", p**n),
            "!": lambda: (f"({x})+{n}!", p + math.factorial(n)),
            "binom": lambda: (f"\\binom{{9}}{{{n}}}+({x})", p + math.comb(9, n)),
        }[sign]()

    signs = st.sampled_from(["+", "-", "*", "/", "frac", "^", "!", "binom"])
    return st.builds(operation, terms, terms, signs, st.integers(0, 6))


@given(st.recursive(numbers, combined, max_leaves=8))
@settings(max_examples=examples(200))
def test_arithmetic_equals_python(term: Term) -> None:
    text, value = term
    assume(len(text) <= 400)
    assert exact_value(text) == value


@pytest.mark.parametrize(
    "text", ["", "x", "2 3", "2^", "(1", "1)", "1/0", "2^{10^{9}}", "9999999!", "1+", "--1", "5!!"]
)
def test_other_texts_have_no_exact_value(text: str) -> None:
    assert exact_value(text) is None


ONES = [
    "zero",
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "eleven",
    "twelve",
    "thirteen",
    "fourteen",
    "fifteen",
    "sixteen",
    "seventeen",
    "eighteen",
    "nineteen",
]
TENS = ["-", "-", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]


def spelled(n: int, joint: str) -> str:
    if n < 20:
        return ONES[n]
    if n < 100:
        return TENS[n // 10] + (f"-{ONES[n % 10]}" if n % 10 else "")
    for unit, name in ((10**9, "billion"), (10**6, "million"), (1000, "thousand"), (100, "hundred")):
        if n >= unit:
            rest = (joint if unit == 100 else " ") + spelled(n % unit, joint) if n % unit else ""
            return f"{spelled(n // unit, joint)} {name}{rest}"
    raise AssertionError


@given(st.one_of(st.integers(0, 1200), st.integers(0, 10**12 - 1)), st.sampled_from([" ", " and "]))
@settings(max_examples=examples(200))
def test_number_words(n: int, joint: str) -> None:
    assert number_of_words(spelled(n, joint)) == n


@pytest.mark.parametrize(
    "text",
    ["hundred", "one one", "ten five", "twenty ten", "twenty-zero", "five twenty", "and", "", "one hundred zero",
     "one thousand thousand", "one thousand two million", "one hundred hundred", "two apples"],
)  # fmt: skip
def test_other_words_are_no_number(text: str) -> None:
    assert number_of_words(text) is None


@st.composite
def unions(draw: st.DrawFn) -> tuple[Bounds, ...]:
    """Draw one interval, or two with a gap between them."""
    ends = draw(st.lists(st.integers(-6, 6), min_size=4, max_size=4, unique=True).map(sorted))
    closed = draw(st.lists(st.booleans(), min_size=4, max_size=4))
    low = draw(st.sampled_from([ends[0], None]))
    if draw(st.booleans()):
        high = draw(st.sampled_from([ends[1], None])) if low is not None else ends[1]
        return ((low, high, closed[0], closed[1]),)
    high = draw(st.sampled_from([ends[3], None]))
    return (low, ends[1], closed[0], closed[1]), (ends[2], high, closed[2], closed[3])


def contains(bounds: tuple[Bounds, ...], x: Fraction) -> bool:
    return any(
        (low is None or low < x or (low_closed and low == x))
        and (high is None or x < high or (high_closed and x == high))
        for low, high, low_closed, high_closed in bounds
    )


def brackets(bounds: Bounds, iso: bool) -> str:
    low, high, low_closed, high_closed = bounds
    left = "[" if low_closed and low is not None else "]" if iso and low is not None else "("
    right = "]" if high_closed and high is not None else "[" if iso and high is not None else ")"
    return f"{left}{-INFINITY if low is None else low},{INFINITY if high is None else high}{right}".replace(
        "inf", r"\infty"
    )


def inequality(bounds: Bounds) -> str:
    low, high, low_closed, high_closed = bounds
    if low is None:
        return f"x{LE if high_closed else '<'} {high}"
    if high is None:
        return f"x{GE if low_closed else '>'} {low}"
    return f"{low}{LE if low_closed else '<'} x{LE if high_closed else '<'} {high}"


def written(bounds: tuple[Bounds, ...], form: str) -> str:
    if form == "inequality":
        return r" \text{ or } ".join(map(inequality, bounds))
    return r"\cup ".join(brackets(part, form == "iso") for part in bounds)


forms = st.sampled_from(["inequality", "iso", "brackets"])


@given(unions(), unions(), st.booleans(), forms, forms, st.booleans())
@settings(max_examples=examples(300))
def test_sets_of_reals(
    a: tuple[Bounds, ...], b: tuple[Bounds, ...], equal: bool, form: str, gold_form: str, reverse: bool
) -> None:
    if equal:
        b = a[::-1] if reverse else a
    points = [Fraction(i, 2) for i in range(-16, 17)]
    same = all(contains(a, x) == contains(b, x) for x in points)
    assert same_answer(written(a, form), written(b, gold_form)) is same


Condition = tuple[str, Callable[[Fraction], bool]]


@st.composite
def conditions(draw: st.DrawFn) -> Condition:
    """Draw a bound, an excluded point or the bound of an absolute value."""
    a, b, factor = draw(st.integers(-6, 6)), draw(st.integers(1, 6)), draw(st.integers(1, 3))
    sign = draw(st.sampled_from(["<", ">", LE, GE]))
    compare = {"<": operator.lt, ">": operator.gt, LE: operator.le, GE: operator.ge}[sign]
    if draw(st.booleans()):
        return draw(st.sampled_from([
            (f"x{sign} {a}", lambda x: compare(x, a)),
            (f"{a}{sign} x", lambda x: compare(a, x)),
            (rf"x\ne {a}", lambda x: x != a),
        ]))  # fmt: skip
    inner = f"{factor if factor > 1 else ''}x{a:+d}" if a else "x"
    size = (lambda x: abs(factor * x + a)) if a else abs
    if a > 0 and draw(st.booleans()):
        inner, size = f"{a}-x", lambda x: abs(a - x)
    bars = draw(st.sampled_from([r"|{}|", r"\left|{}\right|", r"\lvert {}\rvert"])).format(inner)
    return draw(st.sampled_from([
        (f"{bars}{sign} {b}", lambda x: compare(size(x), b)), (f"{b}{sign} {bars}", lambda x: compare(b, size(x))),
    ]))  # fmt: skip


@given(st.lists(conditions(), min_size=1, max_size=3), unions(), st.sampled_from([r"\text{ and }", ", ", r" \land "]))
@settings(max_examples=examples(300))
def test_conditions_are_intersected(joined: list[Condition], other: tuple[Bounds, ...], joint: str) -> None:
    answer = joint.join(text for text, _ in joined)
    points = [Fraction(i, 12) for i in range(-300, 301)]
    inside = [all(holds(x) for _, holds in joined) for x in points]
    if any(inside):
        assert same_answer(answer, written(bounds_of(points, inside), "brackets"))
    same = inside == [contains(other, x) for x in points]
    assert same_answer(answer, written(other, "brackets")) is same


def bounds_of(points: list[Fraction], inside: list[bool]) -> tuple[Bounds, ...]:
    """Return the intervals of a set; their ends are points with even indices."""
    found: list[Bounds] = []
    for holds, group in itertools.groupby(range(len(points)), key=inside.__getitem__):
        first, *_, last = 2 * list(group)
        low = None if first == 0 else points[first - first % 2]
        high = None if last == len(points) - 1 else points[last + last % 2]
        found += [(low, high, first % 2 == 0, last % 2 == 0)] if holds else []
    return tuple(found)


@given(st.integers(1, 9), st.integers(1, 9), st.sampled_from([2, 3, 5, 7]), st.sampled_from([0, 0, 1]))
@settings(max_examples=examples(15), deadline=None)
def test_functions_with_poles(a: int, b: int, pole: int, error: int) -> None:
    quotient = rf"\frac{{{a}x{b - a * pole:+d}}}{{x-{pole}}}" if b != a * pole else rf"\frac{{{a}x}}{{x-{pole}}}"
    assert same_answer(rf"{a + error}+\frac{{{b}}}{{x-{pole}}}", quotient) is (error == 0)
    assert same_answer(rf"{a}-\frac{{{b}}}{{{pole}-x}}", quotient)


@given(st.integers(2, 9), st.integers(2, 9), st.integers(-99, 99), st.integers(-1, 1))
@settings(max_examples=examples(100))
def test_powers_are_values_but_sums_and_products_are_questions(a: int, n: int, b: int, error: int) -> None:
    value = a**n + b + error
    assert same_answer(f"{a}^{{{n}}}{b:+d}", str(value)) is (error == 0)
    assert same_answer(rf"\left(\frac{{1}}{{{a}}}\right)^{{{n}}}", rf"\frac{{1}}{{{a**n + error}}}") is (error == 0)
    assert not same_answer(f"{abs(value)}+{n}", str(abs(value) + n))
    assert not same_answer(rf"{a}\cdot {n}", str(a * n))
