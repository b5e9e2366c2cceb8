"""Extraction of answers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from realhf.rewards.math.extract import extract_answer, last_box


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("so \\boxed{1} then \\boxed{\\frac{1}{2}} then 7", "\\frac{1}{2}"),
        ("so $\\boxed{1}$ and $\\boxed{\\frac{1}{2}}$ then 7", "1, \\frac{1}{2}"),
        ("either \\boxed{3} or \\boxed{5}", "3, 5"),
        ("\\boxed{1}, \\boxed{2}, and $x = \\boxed{3}$", "1, 2, 3"),
        ("\\boxed 8", "8"),
        ("\\boxed{1} and \\boxed{2", "1"),
        ("\\boxed{\\{1\\}}", "\\{1\\}"),
        ("#### 4\n#### 5 apples\n6", "5 apples"),
        ("7+8=15\n####", ""),
        ("The answer is 3.5. We add 9.", "3.5"),
        ("Answer: $x+1$", "x+1"),
        ("It costs $1,234.50 in all.", "$1,234.50"),
        ("from 3 to -4", "-4"),
        ("10-4", "4"),
        ("The final answer is $\\frac{1}{2}$. I hope it is correct.", "\\frac{1}{2}"),
        ("The answer is 5. The answer is 6, since 2+4=6.", "6"),
        ("**Answer:** 7\n8", "7"),
        ("Answer:\n\n7", "7"),
        ("7. The answer is", None),
        ("<think>\\boxed{3}</think> <answer>x + 1</answer>", "x + 1"),
        ("<answer>3</answer><ANSWER>so \\boxed{4}</ANSWER><answer>5", "4"),
        ("<answer></answer> 4", ""),
        ("\\fbox{2} \\boxed {3}", "3"),
        ("\\boxed{\\boxed{3}}", "3"),
        ("\\boxed{a\\}b}}", "a\\}b"),
        ("it is \u22125", "-5"),
        ("it is 5 cm^2 or 5 cm^{2}", "5"),
        ("up by 50%", "50%"),
        ("nothing", None),
        ("", None),
    ],
)
def test_extract_answer(text: str, answer: str | None) -> None:
    assert extract_answer(text) == answer


@given(st.lists(st.sampled_from(["\\boxed{", "{", "}", "\\}", "x"]), max_size=12))
def test_last_box(parts: list[str]) -> None:
    text = "".join(parts)
    complete = []
    for start in (i + 7 for i in range(len(text)) if text.startswith("\\boxed{", i)):
        depth = 1
        for end in range(start, len(text)):
            if text[end - 1] != "\\":
                depth += {"{": 1, "}": -1}.get(text[end], 0)
            if depth == 0:
                complete.append(text[start:end])
                break
    assert last_box(text) == (complete[-1] if complete else None)
