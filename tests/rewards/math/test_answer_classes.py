"""Classes of answers, each with an equal pair and a planted edit that changes the value."""

import pytest

from realhf.rewards.math.equality import judge_math
from realhf.rewards.math.extract import extract_answer

CLASSES = (  # answer, gold, an answer that differs
    (r"0.\bar{3}", r"\frac13", "0.333"),
    (r"0.1\dot{6}", r"\frac16", r"0.\overline{16}"),
    ("0.(36)", r"0.\overline{36}", "0.36"),
    (r"0.363636\ldots", r"0.\overline{36}", r"0.363\ldots 7"),
    (r"1011_\text{two}", "1011_2", r"1011_\text{three}"),
    ("C_{10}^{3}", "120", "C_{10}^{4}"),
    (r"2\operatorname{cis} 60^\circ", r"1+\sqrt3 i", r"\operatorname{cis} 60^\circ"),
    (r"\tan{20^\circ}", r"\tan 20^\circ", r"\tan{70^\circ}"),
    ("sin(x)", r"\sin x", "cos(x)"),
    (r"\lg 5", r"\log_{10} 5", r"\ln 5"),
    (r"\frac\pi2", r"\frac{\pi}{2}", r"\frac2\pi"),
    (r"\sqrt[3]{-8}", "-2", r"\sqrt[3]{8}"),
    ("x\u00b9\u2070", "x^{10}", "x\u00b9"),
    (r"5^{\text{th}}", "5", r"6^{\text{th}}"),
    (r"\text{third}", r"3\text{rd}", r"\text{first}"),
    (r"90\frac{\text{km}}{\text{h}}", r"90\text{ km/h}", r"90\frac{\text{m}}{\text{h}}"),
    (r"\langle 1,2\rangle", r"\begin{pmatrix}1\\2\end{pmatrix}", r"\langle 2,1\rangle"),
    ("(1,2)^T", r"\begin{pmatrix}1\\2\end{pmatrix}", "(1,2)"),
    (r"\begin{pmatrix}1&3\\2&4\end{pmatrix}^T", r"\begin{pmatrix}1&2\\3&4\end{pmatrix}",
     r"\begin{pmatrix}1&3\\2&4\end{pmatrix}"),
    (r"(\pm 1,2)", "(1,2),(-1,2)", "(1,-1,2)"),
    (r"\pm 1\mp\sqrt2", r"1-\sqrt2, -1+\sqrt2", r"1+\sqrt2, -1-\sqrt2"),
    (r"\lambda_1=2, \lambda_2=5", r"\lambda=2,5", r"\lambda_1=2, \lambda_2=6"),
    ("x=5, y=-2", "(5,-2)", r"\{5,-2\}"),
    ("x=5, y=-2", "5,-2", "x=-2, y=5"),
    ("x_1=5, x_2=-2", "-2,5", "x_1=5, x_2=2"),
    ("x_1=5, x_2=-2", "x=5,-2", "y=5,-2"),
    (r"x=1,y=2\text{ or }x=2,y=1", "(1,2),(2,1)", r"x=1,y=2\text{ or }x=2,y=3"),
    ("x=y=z=1", "(1,1,1)", "x=y=1"),
    (r"\left\{-\frac12\right\}", r"-\frac12", r"\left\{\frac12\right\}"),
    (r"\{2^k : k\ge 0\}", r"\{2^n \mid n\ge 0\}", r"\{2^k : k\ge 1\}"),
    (r"\{3k \mid k\in\mathbb{Z}\}", r"\text{multiples of }3", r"\{3k+1 \mid k\in\mathbb{Z}\}"),
    (r"n=3m", r"n=3k, k\in\mathbb{Z}", r"n=3m+1"),
    (r"\text{all odd } n", r"n \text{ odd}", r"\text{all even } n"),
    (r"\text{all } n\ge 3", r"n\ge 3", r"\text{all even } n\ge 3"),
    (r"\text{all real numbers except }2", r"x\ne 2", r"\text{all real numbers except }3"),
    (r"\text{all positive real numbers}", r"(0,\infty)", r"\text{all nonnegative real numbers}"),
    (r"\text{all positive integers}", r"\mathbb{Z}^+", r"\text{all integers}"),
    (r"\text{every prime}", r"\text{all primes}", r"\text{every odd prime}"),
    (r"\text{no such integers}", r"\text{No such integers exist}", r"\text{all integers}"),
    (r"\text{infinite}", r"\text{infinitely many solutions}", r"\text{finite}"),
    (r"\text{The series converges}", r"\text{convergent}", r"\text{The series does not converge}"),
    (r"\text{Alice has a winning strategy}", r"\text{Alice}", r"\text{Alice does not win}"),
    ("C_1e^x+C_2e^{-x}", "Ae^x+Be^{-x}", "C_1e^x+C_2e^{2x}"),
    ("f(x)=kx", "f(x)=cx", "f(x)=x+k"),
    ("f(x)", "f(x)", "f'(x)"),
    ("A^T", "A^T", "A"),
    ("B", r"\text{B. } 12", "C"),
    (r"\textbf{(B)}\ 12", "12", r"\textbf{(B)}\ 13"),
    ("D, B", "B, D", "B"),
    ("x=0", "0", "3x-4y+5=0"),
    ("m-n=0", "0", "x^2-1=0"),
    ("x+y=9", "9", "x^2+y^2=9"),
    ("x=y", "y=x", "y"),
    (r"\begin{cases}2&x<0\\3&\text{otherwise}\end{cases}", r"\begin{cases}2&x<0\\3&0\le x\end{cases}",
     r"\begin{cases}3&x<0\\2&\text{otherwise}\end{cases}"),
    (r"\{{176^{\circ}}\}", r"176^\circ", r"{175^{\circ}}"),
)  # fmt: skip


def verdict(answer: str, gold: str) -> float:
    return judge_math("", rf"\boxed{{{answer}}}", {"solutions": [rf"\boxed{{{gold}}}"]})


@pytest.mark.parametrize(("answer", "gold", "other"), CLASSES)
def test_classes(answer: str, gold: str, other: str) -> None:
    assert (verdict(answer, gold), verdict(other, gold)) == (1.0, 0.0)


@pytest.mark.parametrize(("answer", "gold"), [(r"\textbf{(B)}\ 12", r"\textbf{(C)}\ 12"), ("A", r"\text{(A) and (C)}")])
def test_choices_differ(answer: str, gold: str) -> None:
    assert verdict(answer, gold) == 0.0


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("The answer is:\n\\[\nx+1\n\\]", "x+1"),
        ("<think>\\boxed{5}</think>\nThe answer is 6.", "6"),
        ("<think>so it is \\boxed{5}", None),
        ("<think>We get 5.</think>", "5"),
        ("I think it may be 353 or maybe 198, I cannot decide", None),
        ("There are 30 days. Suppose that", None),
        ("x = 2 or x = 3", None),
        ("12 * 3 =", None),
        ("We get 12 * 3 = 36", "36"),
    ],
)
def test_tentative_and_unfinished_answers(text: str, answer: str | None) -> None:
    assert extract_answer(text) == answer
