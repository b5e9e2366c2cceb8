"""Problems as a list, and the nearest known word."""

import pytest

from realhf.base.errors import RunFailed, UserError, did_you_mean


def test_one_problem_or_many() -> None:
    assert UserError("a").problems == ["a"]
    both = UserError(word for word in ("a", "b"))
    assert both.problems == ["a", "b"] and str(both) == "a\nb"
    assert RunFailed("stopped", "Traceback").traceback_text == "Traceback"


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("ppo.kl_ctrl", "ppo.kl_ctl"),
        ("kl_ctl", "ppo.kl_ctl"),
        ("actor.optimiser.lr", "actor.optimizer.lr"),
        ("warmup_step", None),
    ],
)
def test_the_nearest_word_by_whole_name_or_by_its_last_part(word: str, meant: str | None) -> None:
    known = ["seed", "ppo.kl_ctl", "actor.optimizer.lr"]
    assert did_you_mean(word, iter(known)) == (f"  did you mean {meant} ?" if meant else "")


def test_nothing_is_near_to_nothing() -> None:
    assert did_you_mean("", []) == "" and did_you_mean("x", ["abcdef"]) == ""
