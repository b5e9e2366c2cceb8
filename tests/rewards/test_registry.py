"""Rewards by name, and answers that are judged once."""

from collections.abc import Sequence

import pytest

from realhf.api.config import RewardConfig
from realhf.rewards.judge.pool import Item, JudgePool
from realhf.rewards.judge.remote import RemoteJudge
from realhf.rewards.registry import builtin_verifier, fns_of, judge_once, names_of, open_judge, weights_of
from realhf.rewards.verdict import Status, Verdict


class Counting:
    """Gives the n-th answer it is asked about the score n."""

    def __init__(self) -> None:
        self.asked: list[Item] = []

    def self_test(self) -> None: ...

    def close(self) -> None: ...

    def judge(self, items: Sequence[Item]) -> list[Verdict]:
        self.asked += items
        return [Verdict(float(n), Status.ok) for n in range(len(items))]


def test_equal_items_are_judged_once() -> None:
    items = [("p", "a", {"x": 1, "y": 2}), ("p", "b", {}), ("p", "a", {"y": 2, "x": 1}), ("q", "b", {}), ("p", "b", {})]
    judges = Counting(), Counting()
    for judge, verdicts in zip(judges, judge_once(judges, items), strict=True):
        assert [v.score for v in verdicts] == [0, 1, 0, 2, 1]
        assert [(p, a) for p, a, _ in judge.asked] == [("p", "a"), ("p", "b"), ("q", "b")]
    assert judge_once(judges, []) == [[], []]


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


def test_one_reward_or_several() -> None:
    assert (fns_of(RewardConfig()), weights_of(RewardConfig())) == (["math"], [1.0])
    several = RewardConfig(fns=["math", "format:x"])
    assert (fns_of(several), weights_of(several)) == (["math", "format:x"], [1.0, 1.0])


def test_judges_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKEN", "secret")
    config = RewardConfig(timeout=3.0, processes=2, retries=5, token_env="TOKEN")
    assert open_judge("http://h/x", config) == RemoteJudge("http://h/x", 3.0, 2, 5, "secret")
    judge = open_judge("math", config)
    assert isinstance(judge, JudgePool) and len(judge.children) == 2


def test_a_format_is_all_of_the_answer() -> None:
    with JudgePool("format:<think>.*</think>\\s*<answer>[^<]*</answer>", timeout=20.0) as pool:
        answers = ("<think>a\nb</think>\n<answer>4</answer>", "<think>a</think><answer>4</answer> and more", "4")
        assert [v.score for v in pool.judge([("", a, {}) for a in answers])] == [1.0, 0.0, 0.0]


def test_a_format_that_takes_for_ever_is_a_failure() -> None:
    with JudgePool("format:(a+)+b", timeout=1.0) as pool:
        assert [v.status for v in pool.judge([("", "a" * 60, {}), ("", "ab", {})])] == [Status.timeout, Status.ok]
