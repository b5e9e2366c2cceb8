"""Scaled matrices and sums of unit vectors against exact arithmetic."""

from fractions import Fraction

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from realhf.rewards.math.equality import same_answer
from tests.scaling import examples

fractions = st.builds(Fraction, st.integers(-9, 9), st.integers(1, 4))


def latex(value: Fraction) -> str:
    sign = "-" if value < 0 else ""
    return str(value) if value.denominator == 1 else rf"{sign}\frac{{{abs(value.numerator)}}}{{{value.denominator}}}"


def matrix(rows: list[list[Fraction]], kind: str = "p") -> str:
    body = r"\\".join(" & ".join(map(latex, row)) for row in rows)
    return rf"\begin{{{kind}matrix}}{body}\end{{{kind}matrix}}"


@given(
    st.lists(st.lists(fractions, min_size=2, max_size=2), min_size=1, max_size=3), fractions, fractions, st.booleans()
)
@settings(max_examples=examples(100), deadline=None)
def test_a_factor_multiplies_each_entry(
    rows: list[list[Fraction]], factor: Fraction, other: Fraction, swap: bool
) -> None:
    assume(factor)
    answer = (latex(factor) if factor not in (1, -1) else "-"[: factor < 0]) + matrix(rows, "b")
    for scale in (factor, other):
        gold = matrix([[scale * entry for entry in row] for row in rows])
        same = scale == factor or not any(map(any, rows))
        assert same_answer(*((gold, answer) if swap else (answer, gold))) is same


def unit_sum(values: list[Fraction], mark: str) -> str:
    terms = [
        ("-" if value < 0 else "+") + ("" if abs(value) == 1 else latex(abs(value))) + mark.format(name)
        for value, name in zip(values, "ijk", strict=False)
        if value
    ]
    return "".join(terms).removeprefix("+")


@given(
    st.lists(fractions, min_size=2, max_size=3),
    st.lists(fractions, min_size=2, max_size=3),
    st.booleans(),
    st.sampled_from([r"\mathbf{{{}}}", r"\hat{{{}}}", r"\vec {}", r"\,\mathbf {}", "{}"]),
    st.sampled_from([r"\langle ,\rangle", "(,)", "matrix"]),
)
@settings(max_examples=examples(200))
def test_sums_of_unit_vectors(a: list[Fraction], b: list[Fraction], equal: bool, mark: str, brackets: str) -> None:
    b = a if equal else b
    assume(sum(map(bool, a)) > 1)
    left, _, right = brackets.partition(",")
    gold = matrix([[value] for value in b]) if brackets == "matrix" else left + ",".join(map(latex, b)) + right
    same = a + [Fraction(0)] * (3 - len(a)) == b + [Fraction(0)] * (3 - len(b))
    assert same_answer(unit_sum(a, mark), gold) is same_answer(gold, unit_sum(a, mark)) is same


@pytest.mark.parametrize(
    ("answer", "gold", "same"),
    [
        ("3+4i", "(3,4)", False),
        ("3i", "(3,0)", False),
        (r"4\mathbf j+3\mathbf i", r"\langle 3,4\rangle", True),
        (r"\sqrt{2}\hat{\imath}-\hat{\jmath}", r"(\sqrt2,-1)", True),
        (r"2\begin{vmatrix}1&2\\3&4\end{vmatrix}", r"\begin{vmatrix}2&4\\6&8\end{vmatrix}", False),
        (
            r"\begin{pmatrix}1\\2\end{pmatrix}+t\begin{pmatrix}3\\4\end{pmatrix}",
            r"\begin{pmatrix}1\\2\end{pmatrix}",
            False,
        ),
        (r"A=\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}1\\2\end{pmatrix}", True),
        (r"\frac12", r"\frac12\begin{pmatrix}1&2\\3&4\end{pmatrix}", False),
    ],
)
def test_other_forms(answer: str, gold: str, same: bool) -> None:
    assert same_answer(answer, gold) is same
