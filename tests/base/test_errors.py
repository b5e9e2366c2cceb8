"""Lists of problems, and the closest known word."""

import pytest

from realhf.base.errors import RunFailed, UserError, did_you_mean


def test_a_user_error_has_one_or_more_problems() -> None:
    assert UserError("a").problems == ["a"]
    both = UserError(word for word in ("a", "b"))
    assert both.problems == ["a", "b"] and str(both) == "a\nb"
    assert RunFailed("stopped", "Traceback").traceback_text == "Traceback"


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("ppo.kl_ctrl", "ppo.kl_ctl"),
        ("kl_ctl", "ppo.kl_ctl"),
        ("actor.optimiser.lr", "actor.optimizer.lr"),
        ("warmup_step", None),
    ],
)
def test_the_closest_word_by_full_name_or_by_last_part(word: str, expected: str | None) -> None:
    known = ["seed", "ppo.kl_ctl", "actor.optimizer.lr"]
    assert did_you_mean(word, iter(known)) == (f"  did you mean {expected} ?" if expected else "")


def test_no_suggestion_without_a_close_word() -> None:
    assert did_you_mean("", []) == "" and did_you_mean("x", ["abcdef"]) == ""
