"""Verdicts on sets of answers: different golds, spellings of one answer, a held-out set, and hostile answers."""

import json
import random
import time
from contextlib import closing
from pathlib import Path

import pytest

from realhf.rewards.judge.pool import JudgePool
from realhf.rewards.math.equality import judge_math
from tests.conftest import TIMEOUT_S
from tests.scaling import examples

FOLDER = Path(__file__).parent
GOLDS = (FOLDER / "distinct_golds.txt").read_text().splitlines()
SPELLINGS = [json.loads(line) for line in (FOLDER / "spellings.jsonl").read_text().splitlines()]
MAX_ERRORS = {"heldout_pairs.jsonl": 0.002, "heldout_pairs_2.jsonl": 0.002, "heldout_pairs_3.jsonl": 0.002,
              "heldout_pairs_4.jsonl": 0.005}  # fmt: skip
"""Fraction of wrong verdicts; rules were written with the first three sets in view, and without the fourth."""
CHANGED = (
    "3 factorial", r"3\text{ factorial}", "3 squared", "3 (mod 5)", r"3\pmod{5}", r"\arctan(3)", "arctan(3)", "lcm(3)",
    "reciprocal of 3", "all but 3", "cis(3)", r"\operatorname{cis} 3", "cube of 3", "gcd(3)", "opposite of 3", "base 3",
    "inverse of 3", "ceil(3)", "up to 3", "over 3", "twice 3", "square root of 3", "log(3)", "not 3", "third of 3",
    "(0,3)", "(3,000)", "3:1",
)  # fmt: skip


def verdict(answer: str, gold: str) -> float:
    return judge_math("", rf"So it is $\boxed{{{answer}}}$.", {"solutions": [rf"\boxed{{{gold}}}"]})


@pytest.mark.parametrize("pair", SPELLINGS, ids=lambda pair: f"{pair['answer']} for {pair['gold']}")
def test_spellings_are_accepted(pair: dict[str, str]) -> None:
    assert verdict(pair["answer"], pair["gold"]) == 1.0


def accepted_pairs(n: int, seed: int) -> list[tuple[str, str]]:
    """Return those of ``n`` random pairs of different golds that are accepted."""
    pairs = random.Random(seed).sample([(a, b) for a in GOLDS for b in GOLDS if a != b], n)
    return [pair for pair in pairs if verdict(*pair)]


def test_different_golds_are_rejected() -> None:
    assert accepted_pairs(300, seed=7) == []


@pytest.mark.slow
def test_more_pairs_of_different_golds_are_rejected() -> None:
    assert accepted_pairs(examples(1500), seed=8) == []


@pytest.mark.parametrize("answer", CHANGED)
def test_words_and_brackets_that_change_the_value(answer: str) -> None:
    assert verdict(answer, "3") == verdict(answer, "3000") == 0.0


@pytest.mark.parametrize(("point", "number"), [("(0,360)", "360"), ("(4,225)", "4225"), ("(1,234)", "1234")])
def test_a_point_is_not_a_number_with_thousands(point: str, number: str) -> None:
    assert verdict(point, number) == verdict(number, point) == 0.0
    assert verdict(point, point) == verdict(number, number) == 1.0


@pytest.mark.parametrize(
    "answer", ["A, B, C, D, E", "(A) 3 (B) 4 (C) 5", "A) 3 B) 4 C) 5 D) 6", "A. 3, B. 4", "A or B", "A and B"]
)
def test_a_list_of_choices_is_not_a_choice(answer: str) -> None:
    assert verdict(answer, "A") == 0.0


@pytest.mark.parametrize(
    ("answer", "gold"),
    [(r"€5", r"\$5"), (r"5\text{ cents}", r"\$5"), (r"-\$5", "5"), (r"\$5", r"5\%"), ("3:45 pm", "3:45 am"),
     ("2:3:5", "2:5:3"), ("2", "2:1"), ("1:2:3", "1:6"), (r"19\pmod{13}", r"7\pmod{12}")],
)  # fmt: skip
def test_units_ratios_and_residues_differ(answer: str, gold: str) -> None:
    assert verdict(answer, gold) == 0.0


def test_a_response_that_ends_within_its_box_has_no_answer() -> None:
    assert judge_math("", r"We get 5, so \boxed{5", {"solutions": ["#### 5"]}) == 0.0


@pytest.mark.slow
@pytest.mark.parametrize("name", MAX_ERRORS)
def test_labelled_sets(name: str) -> None:
    pairs = [json.loads(line) for line in (FOLDER / name).read_text().splitlines()]
    verdicts = [(judge_math("", pair["answer"], pair), pair["right"]) for pair in pairs]
    wrong = [verdict for verdict, right in verdicts if verdict != right]
    assert len(pairs) > 700 and len(wrong) / len(pairs) < MAX_ERRORS[name]
    print(f"{name}: {len(wrong)} of {len(pairs)} verdicts are wrong, {sum(wrong):.0f} wrong answers are accepted")


@pytest.mark.slow
def test_hostile_answers_end_in_time() -> None:
    """Each of these takes a symbolic comparison longer than its time limit."""

    def answer(n: int) -> str:
        return rf"(x+y+z+w)^{{{n + 300}}}-(x-y+z-w)^{{{n + 301}}}"

    hostile = [rf"\boxed{{{answer(n)}}}" for n in range(512)]
    rows = {"solutions": [r"\boxed{(x+y)^{400}+(z+w)^{399}}"]}
    begin = time.monotonic()
    with closing(JudgePool("math", timeout=TIMEOUT_S, processes=10)) as pool:
        verdicts = pool.judge([("", answer, rows) for answer in hostile])
    assert all(v.score == 0.0 for v in verdicts)
    print(f"{len(hostile)} hostile answers: {time.monotonic() - begin:.0f} s")
