"""Offsets of steps."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from realhf.algorithms.reward_model.step_splitter import SPLITTERS, latex_steps, line_steps
from realhf.api.config import StepSplitter


def parts_of(text: str, starts: list[int]) -> list[str]:
    return [text[a:b] for a, b in zip(starts, [*starts[1:], len(text)], strict=True)]


@pytest.mark.parametrize(
    ("text", "steps"),
    [
        ("a\nb\n#### 3", ["a", "\nb\n#### 3"]),
        ("\n\na\n\nb\n\n\n#### 3\n", ["\n\na", "\n\nb\n\n\n#### 3\n"]),
        ("one line", ["one line"]),
        ("", [""]),
        ("#### 3", ["#### 3"]),
        ("a\n  \nb", ["a", "\n  \nb"]),
        ("a\n#### 3\nmore", ["a\n#### 3", "\nmore"]),
    ],
)
def test_line_steps(text: str, steps: list[str]) -> None:
    assert parts_of(text, line_steps(text)) == steps


@pytest.mark.parametrize(
    ("text", "steps"),
    [
        ("We know that $x. Y = 3$. Then the sum is $4$.", ["We know that $x. Y = 3$.", " Then the sum is $4$."]),
        ("Let J. Smith run a very long way. He gets tired.", ["Let J. Smith run a very long way.", " He gets tired."]),
        ("Thus\nwe find that the answer is $7$.", ["Thus\nwe find that the answer is $7$."]),
        ("Hence we have the equation\n\\[x = 1. Y = 2.\\]\nNow divide both sides by two.",
         ["Hence we have the equation", "\n\\[x = 1. Y = 2.\\]", "\nNow divide both sides by two."]),
    ],
)  # fmt: skip
def test_latex_steps(text: str, steps: list[str]) -> None:
    assert parts_of(text, latex_steps(text)) == steps


def test_long_steps_are_split_near_the_middle() -> None:
    halves = [
        "The first of these numbers is what we are looking for here,",
        " and the second is what we know from before.",
    ]
    assert parts_of("".join(halves), latex_steps("".join(halves))) == halves
    formula = "$" + "+".join(["a" * 12] * 12) + "=5$"
    parts = parts_of(formula, latex_steps(formula))
    assert len(parts) > 1 and all(20 <= len(part) <= 100 for part in parts)
    assert latex_steps("x" * 500) == [0]


@given(st.sampled_from(StepSplitter), st.text(alphabet="ab .\n$#A,=+\\[]", max_size=200))
def test_parts_add_up(splitter: StepSplitter, text: str) -> None:
    starts = SPLITTERS[splitter](text)
    assert starts[0] == 0 and starts == sorted(set(starts)) and "".join(parts_of(text, starts)) == text
