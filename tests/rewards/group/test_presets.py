"""Self-consistency and diversity: worked examples and invariances."""

import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from realhf.rewards.group.diversity import diversity, n_grams, similarity
from realhf.rewards.group.presets import GROUP_PRESETS, asks_model, check_group_fn, compares
from realhf.rewards.group.self_consistency import self_consistency
from tests.scaling import examples

ANSWERS = ("#### 12", r"\boxed{12}", "so it is 12.0", r"\boxed{\frac{1}{2}}", "0.5", "no idea", "", r"\boxed{x+1}",
           r"\boxed{1+x}", "#### 1,200", "\\boxed{", "\u00e9\u4f60\U0001f600", "A", "the answer is B")  # fmt: skip


def test_self_consistency_is_the_share_of_equal_final_answers() -> None:
    responses = ["It is 7 + 5.\n#### 12", r"\boxed{12}", "#### 13", r"Thus \boxed{\frac{24}{2}}", "I do not know."]
    assert self_consistency("", responses, {}) == [0.6, 0.6, 0.2, 0.6, 0.0]
    assert self_consistency("", ["no"], {}) == [0.0] and self_consistency("", [], {}) == []
    assert self_consistency("", ["#### 1"] * 3, {}) == [1.0] * 3


def test_diversity_of_three_words() -> None:
    """``a b c`` and ``a b d`` share 3 (a, b, a b) of 9 n-grams: 6 each."""
    assert similarity(n_grams("a b c"), n_grams("A b d")) == pytest.approx(3 / 9)
    assert diversity("", ["a b c", "a b d", "x"], {}) == pytest.approx([(2 / 3 + 1) / 2, (2 / 3 + 1) / 2, 1.0])
    assert diversity("", ["same", "same"], {}) == [0.0, 0.0]
    assert diversity("", ["", "one two"], {}) == [0.0, 1.0]  # an empty response is not a diverse one
    assert diversity("", ["alone"], {}) == [0.0]


def test_scripts_without_spaces_have_words_of_one_character() -> None:
    assert ("\u4f60",) in n_grams("\u4f60\u597d") and ("ab",) in n_grams("ab\u4f60\u597d cd")


@settings(max_examples=examples(30), deadline=None)
@given(st.lists(st.sampled_from(ANSWERS) | st.text(max_size=20), max_size=6), st.randoms(use_true_random=False))
def test_the_order_of_responses_does_not_change_scores(responses: Sequence[str], rng: random.Random) -> None:
    order = list(range(len(responses)))
    rng.shuffle(order)
    for function in (self_consistency, diversity):
        scores = function("", responses, {})
        assert all(0 <= score <= 1 for score in scores)
        assert function("", [responses[i] for i in order], {}) == [scores[i] for i in order]


def test_presets() -> None:
    assert {name for name in GROUP_PRESETS if asks_model(name)} == {"pairwise", "rubric"}
    assert [name for name in GROUP_PRESETS if not compares(name)] == ["rubric"] and compares("mine.py:f")
    assert all(check_group_fn(name) == [] for name in GROUP_PRESETS)
