"""Reward functions by name: the built-in verifiers with their self-tests, and checks of names and URLs."""

import inspect
import platform
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from realhf.api.config import RewardConfig
from realhf.base.errors import UserError
from realhf.base.isolation.seccomp import MACHINES
from realhf.rewards.judge.pool import JudgePool
from realhf.rewards.registry import VERIFIERS, BuiltinVerifier, builtin_verifier, check_fn, fns_of, names_of, weights_of
from realhf.rewards.verdict import Status
from tests.conftest import TIMEOUT_S


def self_test_problems(name: str, verifier: BuiltinVerifier) -> list[str]:
    """Return what the self-test of an entry lacks; the judging function itself is run on it by another test."""
    scores = {score for _, _, score in verifier.self_test}
    problems = [f"{name}: no response with score {score}" for score in (1.0, 0.0) if score not in scores]
    return problems if verifier.doc else [*problems, f"{name}: no documentation"]


def test_every_verifier_has_an_accepted_and_a_rejected_response_in_its_self_test() -> None:
    assert [problem for name, verifier in VERIFIERS.items() for problem in self_test_problems(name, verifier)] == []
    accepted = tuple(item for item in VERIFIERS["math"].self_test if item[2] == 1.0)
    assert self_test_problems("x", replace(VERIFIERS["math"], self_test=accepted)) == ["x: no response with score 0.0"]
    assert len(self_test_problems("x", replace(VERIFIERS["math"], self_test=()))) == 2


@pytest.mark.parametrize("name", VERIFIERS)
def test_verifier_passes_its_self_test(name: str) -> None:
    if name.startswith("code") and (sys.platform != "linux" or platform.machine() not in MACHINES):
        pytest.skip("the sandbox needs Linux")
    with closing(JudgePool(name, timeout=TIMEOUT_S)) as pool:
        pool.self_test()
        items = [("", response, row) for response, row, _ in VERIFIERS[name].self_test]
        assert [(v.status, v.score) for v in pool.judge(items)] == [
            (Status.ok, s) for *_, s in VERIFIERS[name].self_test
        ]


def test_a_failed_self_test_is_a_user_error(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = (("#### 73", {"solutions": ["#### 72"]}, 1.0),)
    monkeypatch.setitem(VERIFIERS, "math", replace(VERIFIERS["math"], self_test=wrong))
    with (
        closing(JudgePool("math", timeout=TIMEOUT_S)) as pool,
        pytest.raises(UserError, match="self-test of reward.fn=math failed: '#### 73' .* scored 0.0 instead of 1.0"),
    ):
        pool.self_test()


@pytest.mark.parametrize(
    ("fn", "name", "verifier"),
    [
        ("math", "math", "math"),
        ("dir/mine.py:reward", "reward", None),
        ("format:a:b.*", "format", None),
        ("http://host:80/judge?fn=math", "math@host:80", "math"),
        ("https://host/judge", "host/judge", None),
        ("http://host/judge?fn=mine", "mine@host", None),
    ],
)
def test_names(fn: str, name: str, verifier: str | None) -> None:
    assert (names_of([fn]), builtin_verifier(fn)) == ([name], verifier)


def test_one_or_several_rewards() -> None:
    assert (fns_of(RewardConfig()), weights_of(RewardConfig())) == (["math"], [1.0])
    several = RewardConfig(fns=["math", "format:x"])
    assert (fns_of(several), weights_of(several)) == (["math", "format:x"], [1.0, 1.0])


def test_format_must_match_the_whole_response() -> None:
    with closing(JudgePool("format:<think>.*</think>\\s*<answer>[^<]*</answer>", timeout=TIMEOUT_S)) as pool:
        responses = ("<think>a\nb</think>\n<answer>4</answer>", "<think>a</think><answer>4</answer> and more", "4")
        assert [v.score for v in pool.judge([("", a, {}) for a in responses])] == [1.0, 0.0, 0.0]


def test_format_with_exponential_backtracking_times_out() -> None:
    with closing(JudgePool("format:(a+)+b", timeout=1.0)) as pool:
        assert [v.status for v in pool.judge([("", "a" * 60, {}), ("", "ab", {})])] == [Status.timeout, Status.ok]


@pytest.mark.parametrize(
    ("fn", "words"),
    [
        ("maths", f"must be one of {', '.join(VERIFIERS)}, none, or 'file.py:function'"),
        ("r.txt:f", "must be one of math, math_strict, code"),
        ("none.py:f", "no such file: none.py"),
        ("broken.py:f", "broken.py is not valid Python"),
        ("good.py:reword", "does not define 'reword'  did you mean reward ?"),
        ("format:(", "invalid regular expression"),
    ],
)
def test_invalid_names_are_found_without_running_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fn: str, words: str
) -> None:
    (tmp_path / "broken.py").write_text("def f(:")
    (tmp_path / "good.py").write_text("def reward(p, a, r): return 1\n1 / 0")
    monkeypatch.chdir(tmp_path)
    assert words in check_fn(fn)[0]
    with pytest.raises(UserError, match="reward.fn"):
        JudgePool(fn, timeout=1.0)


SIGNATURES = {
    "a, b, c": True, "a, b": False, "": False, "a": False, "a, b, c, d": False, "a, b, c, d=1": True, "*args": True,
    "a, b=1": False, "a, *rest": True, "a, b, c, *, key": False, "a, b, c, *, key=1": True, "a, /, b, c": True,
    "a, b, **rest": False, "a, b, c, d, *rest": False, "a=1, b=2, c=3": True, "*, a, b, c": False,
}  # fmt: skip


@pytest.mark.parametrize("keyword", ["def", "async def"])
@pytest.mark.parametrize(("arguments", "fits"), SIGNATURES.items())
def test_functions_that_cannot_take_three_arguments_are_refused(
    tmp_path: Path, arguments: str, fits: bool, keyword: str
) -> None:
    file = tmp_path / "r.py"
    source = f"{keyword} score({arguments}):\n    return 1.0\n"
    file.write_text(source)
    names: dict[str, Any] = {}
    exec(source, names)
    try:
        inspect.signature(names["score"]).bind(1, 2, 3)
    except TypeError:
        assert not fits
    expected = [] if fits else [f"reward.fn='{file}:score': score must take three arguments: prompt, response and row"]
    assert check_fn(f"{file}:score") == expected


@pytest.mark.parametrize(
    "source",
    [
        "import functools\n@functools.cache\ndef score(a): ...\n",
        "def score(a): ...\nscore = print\n",
        "if True:\n    def score(a): ...\nelse:\n    def score(a, b, c): ...\n",
        "class score:\n    def __new__(cls, a, b, c): return 1.0\n",
        "def make():\n    def score(a): ...\n    return score\nfrom x import score\n",
        "def score(a): ...\nimport y as score\n",
        "for score in (1, 2): ...\n",
        "def score(a): ...\nif (score := 1): ...\n",
        "def score(a): ...\ndef score(a, b, c): ...\n",
    ],
)
def test_functions_whose_arguments_the_source_does_not_show_are_accepted(tmp_path: Path, source: str) -> None:
    (tmp_path / "r.py").write_text(source)
    assert check_fn(f"{tmp_path / 'r.py'}:score") == []


def test_imports_assignments_and_classes_define_names_too(tmp_path: Path) -> None:
    file = tmp_path / "r.py"
    file.write_text("from x import a as b\nimport c\nif True:\n    d = e = len\nclass f: pass\n")
    assert [check_fn(f"{file}:{name}") for name in "bcdef"] == [[]] * 5
    assert check_fn("math") == []


@pytest.mark.parametrize("url", ["http://host", "https://host:8000/path?fn=math", "http://[::1]:80/"])
def test_valid_urls(url: str) -> None:
    assert check_fn(url) == []


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("http://", "is not of the form"),
        ("http://:80/x", "is not of the form"),
        ("http://host:port/", "reward.fn='http://host:port/': "),
        ("http://host:99999/", "reward.fn="),
        ("http://me:secret@host/", "contains a password in the URL of host"),
        ("http://host/a b", "no spaces"),
    ],
)
def test_invalid_urls(url: str, words: str) -> None:
    (problem,) = check_fn(url)
    assert words in problem and "secret" not in problem
