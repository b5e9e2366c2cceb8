"""Verdicts on maths responses, with time limits."""

import json
import subprocess
import sys
from contextlib import closing
from itertools import islice
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from realhf.rewards.judge.pool import JudgePool
from realhf.rewards.math.equality import judge_math, same_answer
from realhf.rewards.math.symbolic import TIME_LIMIT
from realhf.rewards.verdict import Status
from tests.conftest import TIMEOUT_S
from tests.scaling import examples

PAIRS = [json.loads(line) for line in (Path(__file__).parent / "math_pairs.jsonl").read_text().splitlines()]
ENDLESS = (r"\boxed{\left(\frac{x+1}{x-1}\right)^{999} + (x+y+1)^{999}}", r"\boxed{(x+y)^{998}(x-y)^{999}}")
GSM8K = Path(__file__).parents[3] / "../shared/data/gsm8k_train.jsonl"


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


def test_any_solution_is_accepted() -> None:
    row = {"solutions": ["\\boxed{3}", "4"]}
    assert [judge_math("", f"\\boxed{{{n}}}", row) for n in (3, 4, 5)] == [1.0, 1.0, 0.0]


def test_row_without_solutions_raises() -> None:
    with pytest.raises(ValueError, match="solutions"):
        judge_math("", "1", {"solutions": []})


@settings(max_examples=examples(50))
@given(st.text(alphabet="\\{}$#=.,0123boxedfrac answer is\n+-_()[]%\u00e9", max_size=12), st.sampled_from("{:"))
def test_no_response_raises(text: str, marker: str) -> None:
    answer = f"\\boxed{{{text}}}" if marker == "{" else f"#### {text}"
    assert judge_math("", answer, {"solutions": ["#### 12345.5"]}) == 0.0


def test_gsm8k_solutions() -> None:
    if not GSM8K.is_file():
        pytest.skip(f"third-party data {GSM8K.name} is not available")
    with GSM8K.open() as lines:
        answers = [json.loads(line)["answer"] for line in islice(lines, 40)]
    assert [judge_math("", a, {"solutions": [a]}) for a in answers] == [1.0] * 40
    assert [judge_math("", a + "1", {"solutions": [a]}) for a in answers] == [0.0] * 40


def test_at_most_one_percent_of_the_labelled_pairs_is_misjudged() -> None:
    assert len(PAIRS) >= 500 and {pair["right"] for pair in PAIRS} == {0, 1}
    with closing(JudgePool("math", timeout=TIMEOUT_S)) as pool:
        verdicts = pool.judge([("", pair["answer"], pair) for pair in PAIRS])
    wrong = [(p["kind"], p["answer"][-80:], v) for p, v in zip(PAIRS, verdicts, strict=True) if v.score != p["right"]]
    assert len(wrong) <= len(PAIRS) // 100, wrong
    assert [v for v in verdicts if v.status is not Status.ok] == []


def test_endless_evaluation_ends_at_the_deadline() -> None:
    answer, solution = ENDLESS
    with closing(JudgePool("math", timeout=2.0)) as pool:
        endless, next_verdict = pool.judge(
            [("", answer, {"solutions": [solution]}), ("", "#### 5", {"solutions": ["#### 5"]})]
        )
    assert (endless.score, next_verdict.score, next_verdict.status) == (0.0, 1.0, Status.ok)


def test_numbers_do_not_import_sympy() -> None:
    code = f"""
import json, sys
from realhf.rewards.math.equality import judge_math
pairs = {[p for p in PAIRS if p["kind"] in ("integer", "GSM8K", "currency", "thousands", "percent")]!r}
print([judge_math("", p["answer"], p) for p in pairs] == [p["right"] for p in pairs], "sympy" in sys.modules)
"""
    done = subprocess.run(
        [sys.executable, "-"], input=code, text=True, capture_output=True, timeout=TIMEOUT_S, check=True
    )
    assert done.stdout == "True False\n"


@pytest.mark.parametrize("text", ["\\boxed{" * 50_000, "{" * 300_000, "answer is " * 50_000, "<answer>" * 50_000,
                                  "1,1" * 100_000, "#### " * 50_000, "$" * 300_000])  # fmt: skip
def test_extraction_takes_linear_time(text: str) -> None:
    with closing(JudgePool("math", timeout=10.0)) as pool:
        (verdict,) = pool.judge([("", text, {"solutions": ["\\boxed{x+1}"]})])
    assert (verdict.score, verdict.status) == (0.0, Status.ok)


@given(st.integers(), st.integers())
def test_integers_are_compared_exactly(a: int, b: int) -> None:
    right = [judge_math("", f"#### {a:,}", {"solutions": [f"\\boxed{{{n}}}"]}) for n in (a, b)]
    assert right == [1.0, float(a == b)]


@given(st.integers(-999, 999), st.integers(1, 999), st.integers(-999, 999), st.integers(1, 999))
def test_fractions_are_compared_exactly(a: int, b: int, c: int, d: int) -> None:
    given_answer = f"\\boxed{{\\frac{{{a}}}{{{b}}}}}"
    assert judge_math("", given_answer, {"solutions": [f"\\boxed{{{c}/{d}}}"]}) == float(a * d == b * c)


@given(
    st.sampled_from(["Answer: {}", "It is {}", "<answer>{}</answer>", r"\boxed{{{}}}", "#### {}", r"\boxed{{{}"]),
    st.integers(-999, 999),
    st.integers(-999, 999),
)
def test_strict_verdicts_need_a_mark(form: str, value: int, gold: int) -> None:
    row = {"solutions": [f"#### {gold}"]}
    marked = form.startswith("#") or form.endswith("}}}")
    assert judge_math("", form.format(value), row, strict=True) == float(marked and value == gold)


def test_the_time_limit_of_a_response_ends_with_its_verdict() -> None:
    slow = "(x+y+z+w)^{300}-(x-y+z-w)^{301}"
    assert judge_math("", rf"\boxed{{{slow}}}", {"solutions": [r"\boxed{(x+y)^{400}+(z+w)^{399}}"]}) == 0.0
    with pytest.raises(ValueError), TIME_LIMIT.shared():
        raise ValueError
    assert same_answer(r"\sin^2 x+\cos^2 x", "1+x-x")
