"""Exact comparison of integers, validated tests, and time limits."""

import json
from collections.abc import Iterator
from contextlib import closing
from decimal import Decimal

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from realhf.rewards.code.judge_code import CodeJudge, same_value, same_word
from realhf.rewards.judge.pool import JudgePool
from realhf.rewards.sandbox.sandbox import Reason
from realhf.rewards.verdict import Status
from tests.conftest import TIMEOUT_S
from tests.rewards.code.test_judge_code import ADD, LONG, function, runs, script
from tests.scaling import examples

integers = st.one_of(st.integers(-20, 20), st.integers(-(10**30), 10**30), st.integers(0, 30).map(lambda n: 10**n + 7))
spellings = st.sampled_from(["{:d}", "{:d}.0", "{:.6e}", "{:.1f}", "{:g}", "+{:d}", "{:d}.", "0{:d}"])


@given(integers, integers, spellings)
@settings(max_examples=examples(300))
def test_a_number_equals_an_integer_only_exactly(expected: int, written: int, spelling: str) -> None:
    word = spelling.format(written)
    assume(word.lstrip("+-").replace(".", "").replace("e", "").replace("+", "").replace("-", "").isdigit())
    if same_word(word, str(expected)):
        assert Decimal(word) == expected


@pytest.mark.parametrize(
    ("word", "expected", "same"),
    [
        ("1e9", "1000000007", False),
        ("1e18", str(10**18 + 7), False),
        ("1000000000000000000.0", "1000000000000000001", False),
        ("3.0", "3", True),
        ("3.0000001", "3", False),
        ("011", "11", False),
        ("True", "1", False),
        ("0.33333", "0.333333", True),
        ("1e9", "1000000000.5", True),
        ("0.3", "0.333333", False),
    ],
)
def test_words(word: str, expected: str, same: bool) -> None:
    assert same_word(word, expected) is same


@given(integers, st.floats(allow_nan=False))
@settings(max_examples=examples(200))
def test_a_float_equals_an_integer_only_exactly(expected: int, value: float) -> None:
    assert not same_value(expected / 2, expected) or expected == 0
    assert same_value(value, expected) is (abs(value) <= 2**53 and value == expected)


@pytest.mark.parametrize(
    ("value", "expected", "same"),
    [
        (True, 1, False),
        (1, True, False),
        (False, 0, False),
        ([True], [1], False),
        ({"a": 1}, {"a": True}, False),
        (True, True, True),
        (1e18, 10**18 + 7, False),
        (2.0, 2, True),
        (2, 2.0, True),
        (10**16, 1e16, True),
        (0.1 + 0.2, 0.3, True),
        (1, 1.000001, False),
        ("1", 1, False),
        (None, 0, False),
        ((1, [2.0]), [1, [2]], True),
    ],
)
def test_values(value: object, expected: object, same: bool) -> None:
    assert same_value(value, expected) is same


@pytest.fixture(scope="module")
def pool() -> Iterator[JudgePool]:
    with closing(JudgePool("code", timeout=TIMEOUT_S, test_timeout=2.0)) as pool:
        yield pool


INVALID = [
    {},
    {"input_output": ""},
    {"input_output": "[]"},
    {"input_output": None},
    {"input_output": {"inputs": [], "outputs": []}},
    {"input_output": json.dumps({"inputs": [], "outputs": [], "fn_name": "f"})},
    {"input_output": {"inputs": ["1"], "outputs": []}},
    {"input_output": {"inputs": [1], "outputs": ["1"]}},
    {"input_output": {"inputs": ["x"], "outputs": ["1"], "fn_name": "f"}},
    {"input_output": {"inputs": ["1"], "outputs": ["1"], "fn_name": 3}},
    {"stub": "def f():", "test": "", "entry_point": "f"},
    {"stub": "def f():", "entry_point": "f"},
]


@runs
def test_rows_without_valid_tests_score_nothing(pool: JudgePool) -> None:
    for row, verdict in zip(INVALID, pool.judge([("", LONG, row) for row in INVALID]), strict=True):
        assert verdict.status is Status.error and verdict.score == 0.0 and "ValueError" in verdict.detail, row


@runs
@pytest.mark.parametrize("name", [None, ""])
def test_an_empty_function_name_means_standard_input(pool: JudgePool, name: str | None) -> None:
    row = {"input_output": {**json.loads(ADD["input_output"]), "fn_name": name}}
    right, wrong = pool.judge([("", LONG, row), ("", "print(1)", row)])
    assert (right.score, wrong.score) == (1.0, 0.0)


@runs
def test_a_right_program_passes_many_tests() -> None:
    many = [(f"{n} {n}", str(2 * n)) for n in range(250)]
    judge = CodeJudge(TIMEOUT_S, 6.0)  # the default of reward.test_timeout, which is for each of them
    with closing(judge.sandbox):
        assert judge.judge(LONG, script(*many)).reason is Reason.ok
        calls = function("f", *((str(n), str(n + 1)) for n in range(250)))
        assert judge.judge("def f(n):\n    return n + 1\n", calls).reason is Reason.ok


@runs
def test_the_time_limit_of_a_test(pool: JudgePool) -> None:
    row = script(("", "1"), ("", "1"))
    slow, late = pool.judge([("", "import time\ntime.sleep(5)\nprint(1)", row), ("", "print(1)", row)])
    assert (slow.detail, late.detail) == ("timeout", "ok")
