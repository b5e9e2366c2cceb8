"""Requests and answers of the presets that ask a language model."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from realhf.api.config import LLMJudgeConfig
from realhf.rewards.llm_judge.questions import (
    TEXTS,
    Question,
    filled,
    marked,
    pairs,
    questions_of,
    read_score,
    read_winner,
    rubric_of,
    scores_of,
)
from realhf.rewards.verdict import ResponseGroup
from tests.rewards.llm_judge.endpoint import part

SCORES = {  # an answer, and its score of 0 to 10 as a share
    "Score: 7": 0.7, "score : 7.5": 0.75, "Good.\n\n**Score: 8**": 0.8, "Score: 3\nOn reflection:\nScore: 4": 0.4,
    "Score: 9/10": 0.9, "> Score: 10/10.": 1.0, "Score: 0\r\n": 0.0, "# Score: +2": 0.2, "- Score: 5": None,
    '{"score": 6}': 0.6, '```json\n{"why": "a {b}", "score": 2.5}\n```': 0.25, '{"score": 1} then {"score": 9}': 0.9,
    '{"score": 1, "parts": {"score": 9}}': 0.1, 'Score: 1 {"score": 2}': 0.2, "": None, "7": None, "Score: seven": None,
    "Score: 11": None, "Score: -1": None, "Score: 1e999": None, "Score: NaN": None, "Score: 1e1": None, "Score:": None,
    '{"score": NaN}': None, '{"score": Infinity}': None, '{"score": 1e999}': None, '{"score": "7"}': None,
    '{"score": true}': None, '{"score": null}': None, '{"score": [7]}': None, "Score: 7 or 8": None,
    "My score: 7": None,
    '{"score": 1' + "0" * 400 + "}": None, '{"a":' * 3000: None, "{" * 20_000: None, "Score: " + "9" * 5000: None,
    "Score:" + " " * 20_000 + "7": None, " " * 20_000 + "Score: 7": None, "\n" * 19_000 + "Score: 7": 0.7,
    "x" * 10**6 + "\nScore: 7": 0.7,
}  # fmt: skip
WINNERS = {
    "Winner: A": 1.0, "winner: b": 0.0, "**Winner: Tie**": 0.5, "Winner: Response A.": 1.0, '{"winner": "B"}': 0.0,
    "Winner: A\nNo:\nWinner: B": 0.0, '{"winner": "tie"}': 0.5, "Winner: C": None, "A": None, "": None,
    "Winner: A or B": None, '{"winner": 1}': None, "The winner: A": None, "Winner: AB": None,
}  # fmt: skip


@pytest.mark.parametrize("answer", SCORES, ids=lambda text: text[:20])
def test_scores_in_answers(answer: str) -> None:
    assert read_score(answer, 0.0, 10.0) == (None if SCORES[answer] is None else pytest.approx(SCORES[answer]))


def test_scores_are_scaled() -> None:
    assert read_score("Score: -1", -3.0, 5.0) == 0.25 and read_score("Score: 0", 1.0, 5.0) is None


@pytest.mark.parametrize("answer", WINNERS)
def test_winners_in_answers(answer: str) -> None:
    assert read_winner(answer) == WINNERS[answer]


@given(st.text(), st.floats() | st.integers())
def test_any_answer_has_a_share_or_none(text: str, number: float) -> None:
    for answer in (text, f"{text}\nScore: {number}", f"{text} {json.dumps({'score': number})}", f"Winner: {text}"):
        found = read_score(answer, 0.0, 10.0)
        assert found is None or 0 <= found <= 1
        assert read_winner(answer) in (None, 0.0, 0.5, 1.0)


@given(st.text(), st.text(), st.text())
def test_texts_are_inserted_as_they_are(prompt: str, response: str, rubric: str) -> None:
    """Placeholders and markers in a text have no effect."""
    config = LLMJudgeConfig(rubric=rubric)
    group = ResponseGroup(prompt, (response + "{rubric} {mark} >>", "{prompt}"), {})
    first, second = questions_of("rubric", group, config, TEXTS["rubric"])
    assert part(first.text, "RESPONSE") == response + "{rubric} {mark} >>" and part(first.text, "PROMPT") == prompt
    assert part(second.text, "RESPONSE") == "{prompt}"
    assert "from 0 (not at all) to 10 (fully)" in first.text


def test_own_templates_keep_other_braces() -> None:
    assert filled('{response} in {"a": {b}} {response}', response="{b}") == '{b} in {"a": {b}} {b}'
    assert marked("{a}{mark}", a="x") != marked("{a}{mark}", a="y")


def test_rubrics_of_rows() -> None:
    config = LLMJudgeConfig(rubric="short")
    assert rubric_of({}, config) == "short" and rubric_of({"rubric": "true"}, config) == "true"
    assert rubric_of({"rubric": ["is true", "is short"]}, config) == "- is true\n- is short"
    assert "correctly" in rubric_of({"rubric": None}, LLMJudgeConfig())
    for invalid in (3, [], "", " ", [1], {"a": "b"}, ["a", ""]):
        with pytest.raises(ValueError, match="it must be a text or a list of texts"):
            rubric_of({"rubric": invalid}, config)


@given(st.integers(0, 12), st.integers(0, 12))
def test_every_response_is_in_enough_comparisons(n: int, comparisons: int) -> None:
    chosen = pairs(n, comparisons)
    counts = [sum(i in pair for pair in chosen) for i in range(n)]
    assert len(set(chosen)) == len(chosen) and all(0 <= i < j < n for i, j in chosen) and len(set(counts)) <= 1
    if comparisons in range(1, n - 1):
        assert all(comparisons <= count <= comparisons + 1 for count in counts)
    else:
        assert len(chosen) == math.comb(n, 2)


def test_pairs_are_shown_in_a_random_order_or_in_both() -> None:
    group = ResponseGroup("q", tuple("abcdefgh"), {}, prompt_id=3, seed=1)
    config = LLMJudgeConfig()
    chosen = questions_of("pairwise", group, config, TEXTS["pairwise"])
    assert {tuple(sorted(one.about)) for one in chosen} == set(pairs(8, 0)) and len(chosen) == 28
    assert 5 < sum(one.about[0] < one.about[1] for one in chosen) < 23
    assert questions_of("pairwise", group, config, TEXTS["pairwise"]) == chosen
    config.both_orders = True
    assert len({one.about for one in questions_of("pairwise", group, config, TEXTS["pairwise"])}) == 56


def test_scores_are_shares_of_the_comparisons_with_an_answer() -> None:
    """0 beats 1 and ties with 2; of 1 and 2 there is no answer; 3 has none at all."""
    questions = [Question("", about) for about in ((0, 1), (2, 0), (1, 2), (3, 1))]
    assert scores_of(4, questions, [1.0, 0.5, None, None]) == [0.75, 0.0, 0.5, None]
    assert scores_of(2, [Question("", (0,)), Question("", (1,))], [0.3, None]) == [0.3, None]


def test_equal_responses_tie_without_a_question() -> None:
    (question,) = questions_of("pairwise", ResponseGroup("q", ("same", "same"), {}), LLMJudgeConfig(), "")
    assert question.value == 0.5
