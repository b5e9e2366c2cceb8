"""Which answers are right, and where in a text the answer is."""

import json
import logging
from itertools import islice
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from realhf.rewards.math import extract_answer, judge_math

GSM8K = Path(__file__).parents[2] / "../shared/data/gsm8k_train.jsonl"


@pytest.fixture(autouse=True)
def quiet() -> None:
    logging.getLogger("math_verify").setLevel(logging.ERROR)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("so \\boxed{1} and \\boxed{\\frac{1}{2}} then 7", "\\frac{1}{2}"),
        ("\\boxed{1} and \\boxed{2", "1"),
        ("\\boxed{\\{1\\}}", "\\{1\\}"),
        ("#### 4\n#### 5 apples\n6", "5 apples"),
        ("7+8=15\n####", ""),
        ("The answer is 3.5. We add 9.", "3.5"),
        ("Answer: $x+1$", "x+1"),
        ("It costs $1,234.50 in all.", "$1,234.50"),
        ("from 3 to -4", "-4"),
        ("10-4", "4"),
        ("nothing", None),
        ("", None),
    ],
)
def test_the_answer_is_found(text: str, answer: str | None) -> None:
    assert extract_answer(text) == answer


@pytest.mark.parametrize(
    ("answer", "solution", "right"),
    [
        ("7+8=15\n2+5+1=8\n#### 85", "#### 85", True),
        ("#### 86", "#### 85", False),
        ("#### 1,234", "so\n#### 1234", True),
        ("#### $1234.00", "#### 1,234", True),
        ("#### 18 dollars", "#### 18", True),
        ("#### 85 86", "#### 86", False),
        ("#### 27+58", "#### 85", False),
        ("#### 170/2", "#### 85", False),
        ("#### 27+58=85", "#### 85", True),
        ("####", "#### 85", False),
        ("", "#### 85", False),
        ("no idea", "#### 85", False),
        ("The answer is 72.", "#### 72", True),
        ("The answer is **72**", "#### 72", True),
        ("Altogether she sold 72 clips", "#### 72", True),
        ("Altogether she sold 72 clips in 2 months", "#### 72", False),
        ("\\boxed{\\frac12}", "\\boxed{0.5}", True),
        ("\\boxed{0.5}", "\\boxed{\\frac{1}{2}}", True),
        ("\\boxed{1/2}", "\\boxed{\\dfrac{1}{2}}", True),
        ("\\boxed{2\\sqrt2}", "\\boxed{\\sqrt{8}}", True),
        ("\\boxed{x=5}", "\\boxed{5}", True),
        ("\\boxed{(1, 2)}", "\\boxed{(1,2)}", True),
        ("\\boxed{(2,1)}", "\\boxed{(1,2)}", False),
        ("\\boxed{x^2+1}", "\\boxed{1 + x^2}", True),
        ("\\boxed{x^3}", "\\boxed{x^2}", False),
        ("\\boxed{6\\times 10^5}", "\\boxed{600000}", True),
        ("\\boxed{Tuesday}", "\\boxed{\\text{tuesday}}", True),
        ("-3", "#### 3", False),
        ("#### " + "9" * 5000, "#### 3", False),
    ],
)
def test_verdicts(answer: str, solution: str, right: bool) -> None:
    assert judge_math("", answer, {"solutions": [solution]}) == float(right)


def test_any_solution_will_do() -> None:
    row = {"solutions": ["\\boxed{3}", "4"]}
    assert [judge_math("", f"\\boxed{{{n}}}", row) for n in (3, 4, 5)] == [1.0, 1.0, 0.0]


def test_a_row_without_solutions_is_no_wrong_answer() -> None:
    with pytest.raises(ValueError, match="solutions"):
        judge_math("", "1", {"solutions": []})


@settings(max_examples=50, deadline=None)
@given(st.text(alphabet="\\{}$#=.,0123boxedfrac answer is\n+-_()[]%\u00e9", max_size=12), st.sampled_from("{:"))
def test_no_text_makes_it_raise(text: str, marker: str) -> None:
    answer = f"\\boxed{{{text}}}" if marker == "{" else f"#### {text}"
    assert judge_math("", answer, {"solutions": ["#### 12345.5"]}) == 0.0


def test_the_answers_of_real_rows_are_right_and_others_are_wrong() -> None:
    if not GSM8K.is_file():
        pytest.skip(f"third-party data {GSM8K.name} is not here")
    with GSM8K.open() as lines:
        answers = [json.loads(line)["answer"] for line in islice(lines, 40)]
    assert [judge_math("", a, {"solutions": [a]}) for a in answers] == [1.0] * 40
    assert [judge_math("", a + "1", {"solutions": [a]}) for a in answers] == [0.0] * 40
