"""Time limits of symbolic comparisons."""

import subprocess
import sys
import time

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from realhf.rewards.math.symbolic import TimeLimit, TimeUp, same_mathematics
from tests.conftest import TIMEOUT_S
from tests.scaling import examples


def compute() -> None:
    while True:
        sum(range(1000))


def test_blocking_does_not_use_processor_time() -> None:
    limit = TimeLimit(seconds=0.05, wall_seconds=TIMEOUT_S)
    with limit.shared():
        for _ in range(3):
            with limit.enforced():
                time.sleep(0.1)
        with pytest.raises(TimeUp), limit.enforced():
            compute()
        with pytest.raises(TimeUp), limit.enforced():
            raise AssertionError("the comparisons of a response share one limit")
    with limit.enforced():
        pass  # the limit ends with its block
    with limit.shared(), limit.enforced():
        pass


def test_blocking_ends_at_the_wall_limit() -> None:
    limit = TimeLimit(seconds=TIMEOUT_S, wall_seconds=0.05)
    with limit.shared(), pytest.raises(TimeUp), limit.enforced():
        time.sleep(TIMEOUT_S)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_lost_exception_is_raised_again() -> None:
    class Destructor:
        def __del__(self) -> None:
            compute()

    limit = TimeLimit(seconds=0.05, wall_seconds=TIMEOUT_S)
    with limit.shared(), pytest.raises(TimeUp), limit.enforced():
        Destructor()
        compute()


def test_the_parser_is_loaded_before_the_first_timed_comparison() -> None:
    code = r"""
import sys
from realhf.rewards.math.symbolic import library, same_mathematics
library()
loaded = {name.split(".")[1] for name in sys.modules if name.startswith("sympy.")}
same_mathematics(r"2\cos x+\frac{x+1}{x-1}", r"\sqrt{x+1}-\frac{1}{2x}")
print({name.split(".")[1] for name in sys.modules if name.startswith("sympy.")} - loaded)
"""
    done = subprocess.run([sys.executable, "-c", code], text=True, capture_output=True, timeout=TIMEOUT_S, check=True)
    assert done.stdout == "set()\n"


@given(st.sampled_from("abdfghpqrstuvwxyz"), st.sampled_from("abdfghpqrstuvwxyz"), st.integers(2, 9))
@settings(max_examples=examples(20), deadline=None)
def test_the_case_of_a_symbol_matters(a: str, b: str, n: int) -> None:
    assume(a != b)
    for form in ("{n}{a}{b}", r"\sqrt{{{a}^2+{n}{b}}}", r"\frac{{{a}+{n}}}{{{b}}}", r"\sin {a}+{b}"):
        gold, other = form.format(a=a, b=b, n=n), form.format(a=a.upper(), b=b, n=n)
        assert same_mathematics(gold, gold) and not same_mathematics(other, gold)


@pytest.mark.parametrize(
    ("given_text", "gold", "same"),
    [
        ("ke^{-x}", "Ce^{-x}", True),
        ("ke^{-x}", "ae^{-x}", False),
        (r"\frac{\pi}{2}+2n\pi", r"\frac{\pi}{2}+2k\pi", True),
        (r"\frac{\pi}{2}+n\pi", r"\frac{\pi}{2}+2k\pi", False),
    ],
)
def test_bound_letters(given_text: str, gold: str, same: bool) -> None:
    assert same_mathematics(given_text, gold) is same
