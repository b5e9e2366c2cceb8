"""Warnings of a step: each sign of a failing run, and none for ordinary steps."""

from math import inf, nan

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from realhf.apps.view.step_warnings import step_warnings
from tests.scaling import examples

ORDINARY = {"actor_gen/truncated": 0.3, "kl/ref": 0.02, "length/response": 90.0, "actor_train/grad_norm": 1.0,
            "reward/mean": 0.5, "rew_inf/reward_sq": 0.5, "loss": -0.01, "actor_train/logprob_diff": 0.001}  # fmt: skip


def kinds(changes: dict[str, float], before: int = 5) -> set[str]:
    return set(step_warnings({**ORDINARY, **changes}, 0.1, [ORDINARY] * before))


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({"actor_gen/truncated": 0.95}, "truncated actor_gen"),
        ({"gen/truncated": 1.0}, "truncated gen"),
        ({"eval_gen/truncated": 1.0}, ""),
        ({"actor_gen/truncated": 1.0, "actor_gen/turns": 8.0}, "truncated actor_gen"),
        ({"actor_gen/truncated": 0.5, "actor_gen/turns": 8.0}, "truncated actor_gen"),
        ({"actor_gen/truncated": 0.4, "actor_gen/turns": 8.0}, ""),
        ({"kl/ref": 1.5}, "kl"),
        ({"kl/ref": 0.9}, ""),
        ({"kl/ref": -50.0}, ""),
        ({"actor_train/grad_norm": 101.0}, "gradient actor_train"),
        ({"actor_train/grad_norm": 99.0}, ""),
        ({"actor_train/grad_norm": inf}, "finite actor_train/grad_norm"),
        ({"loss": nan}, "finite loss"),
        ({"kl/ref": nan}, "finite kl/ref"),
        ({"actor_train/logprob_diff": 0.2}, "logprobs actor_train"),
        ({}, ""),
    ],
)
def test_signs_of_a_failing_run(changes: dict[str, float], kind: str) -> None:
    assert kinds(changes) == ({kind} if kind else set())


def test_growth_is_relative_to_several_earlier_steps() -> None:
    assert kinds({"actor_train/grad_norm": 1e6, "kl/ref": 9.0}, before=2) == set()
    assert kinds({"kl/ref": 11.0}, before=0) == {"kl"}
    lines = step_warnings({"kl/ref": 50.0}, 0.1)
    assert not lines, "of DPO, which has no responses of its own, the metric is per response"


def test_a_first_gradient_after_steps_without_a_signal_is_no_growth() -> None:
    before = [{"actor_train/grad_norm": 1e-6}] * 5
    assert not step_warnings({"actor_train/grad_norm": 0.9}, 0.1, before)
    assert set(step_warnings({"actor_train/grad_norm": 1.1}, 0.1, before)) == {"gradient actor_train"}


@settings(max_examples=examples(100))
@given(st.lists(st.floats(-1e6, 1e6, width=32), min_size=2, max_size=9), st.booleans())
def test_equal_rewards_are_noticed_and_different_ones_are_not(rewards: list[float], equal: bool) -> None:
    rewards = rewards[:1] * 7 if equal else rewards
    spread = max(rewards) - min(rewards)
    mean, square = sum(rewards) / len(rewards), sum(r * r for r in rewards) / len(rewards)
    found = kinds({"reward/mean": mean, "rew_inf/reward_sq": square})
    if spread == 0:
        assert found == {"equal"}
    elif spread > 1e-3 * max(map(abs, rewards)):
        assert found == set()


@settings(max_examples=examples(100))
@given(st.dictionaries(st.sampled_from(list(ORDINARY)), st.floats()), st.integers(0, 5), st.floats(0, 1))
def test_any_metrics_give_short_lines(changes: dict[str, float], before: int, limit: float) -> None:
    for line in step_warnings({**ORDINARY, **changes}, limit, [{**ORDINARY, **changes}] * before).values():
        assert len(line) < 200 and line.isprintable()


@pytest.mark.parametrize("turns, limit", [({}, "max_new_tokens"), ({"actor_gen/turns": 8.0}, "env.max_turns")])
def test_a_truncation_names_its_limit(turns: dict[str, float], limit: str) -> None:
    (text,) = step_warnings({"actor_gen/truncated": 1.0, **turns}, 0.1).values()
    assert limit in text
