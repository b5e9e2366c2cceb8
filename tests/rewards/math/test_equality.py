"""The checks of the comparison one by one; `math_pairs.jsonl` has many more cases."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from realhf.rewards.math.equality import same_answer
from realhf.rewards.math.symbolic import is_safe_for_sympy, same_mathematics
from realhf.rewards.math.text_answers import is_text
from tests.scaling import examples


@pytest.mark.parametrize(
    ("given_text", "gold", "same"),
    [
        ("(C) 42", "C", True),
        ("42", "C", False),
        ("The Eiffel Tower", "eiffel tower", True),
        ("listen", "silent", False),
        ("101_2", "101_{2}", True),
        ("101_3", "101_2", False),
        ("27+58=85", "85", True),
        ("27+58", "85", False),
        ("5=x", "5", True),
        ("x=5", "y=5", False),
        ("(1,2]", "(1,2)", False),
        ("[\\frac12, 1]", "[0.5,1]", True),
        ("2, 1", "\\{1,2\\}", True),
        ("(2,1)", "(1,2)", False),
        ("\\{1,2\\}", "\\{\\{1\\},\\{2\\}\\}", False),
        ("\\{\\{2\\},\\{1\\}\\}", "\\{\\{1\\},\\{2\\}\\}", True),
        ("\\{5\\}", "5", True),
        ("\\pm 3", "-3,3", True),
        ("\\begin{bmatrix}1&2\\end{bmatrix}", "\\begin{pmatrix}1&2\\end{pmatrix}", True),
        ("\\begin{vmatrix}1&2\\end{vmatrix}", "\\begin{pmatrix}1&2\\end{pmatrix}", False),
        ("x^2+c", "x^2+C", True),
        ("x^2", "x^2+C", False),
        ("2\\sqrt{2}", "\\sqrt{8}", True),
        ("9\\pi\\text{ cm}^2", "9\\pi", True),
    ],
)
def test_same_answer(given_text: str, gold: str, same: bool) -> None:
    assert same_answer(given_text, gold) is same


@given(st.lists(st.integers(-99, 99), min_size=2, max_size=5, unique=True), st.randoms())
def test_order_matters_in_tuples_and_not_in_sets(numbers: list[int], random) -> None:  # type: ignore[no-untyped-def]
    mixed = random.sample(numbers, len(numbers))
    a, b = (",".join(map(str, row)) for row in (numbers, mixed))
    assert same_answer(f"\\{{{b}\\}}", f"\\{{{a}\\}}") and same_answer(b.replace(",", ", "), a.replace(",", ", "))
    assert same_answer(f"({b})", f"({a})") is (mixed == numbers)


@settings(max_examples=examples(60))
@given(st.text(max_size=20), st.sampled_from(["5", "(1,2)", "x+1", "\\{1,2\\}", "Tuesday", "C"]))
def test_no_text_raises(text: str, gold: str) -> None:
    assert same_answer(gold, gold) and same_answer(text, gold) in (True, False)


@pytest.mark.parametrize(
    "text",
    ["9^99999", "9^{99999}", "9^{9^{9}}", "1234!", "9!!", "}{", "{", "", "x+" * 300 + "x", "1" * 50, "system(1)"],
)
def test_unsafe_expressions_are_not_evaluated(text: str) -> None:
    assert not is_safe_for_sympy(text) and not same_mathematics(text, "x")


def test_is_text() -> None:
    assert [is_text(t) for t in ("Tuesday", "red and blue", "yes", "xyz", "2x", "\\pi")] == [1, 1, 1, 0, 0, 0]
