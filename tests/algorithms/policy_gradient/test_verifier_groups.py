"""The verifier with a group-wise reward, without any function, and beside a reward model."""

from pathlib import Path

import pytest
import torch

from realhf.algorithms.policy_gradient.config import PPOConfig
from realhf.algorithms.policy_gradient.rewards import rewards_of
from realhf.algorithms.policy_gradient.verifier import VerifierConfig
from realhf.api.batch_meta import RowId
from realhf.api.config import RewardConfig
from tests.algorithms.policy_gradient.test_verifier import responses, run

SAME = ("#### 72", "so 72\n#### 72", "#### 71", "none")  # agreement: 1/2, 1/2, 1/4, 0
FUNCTIONS = """
def first_fails(prompt, responses, row):
    return [len(response) for response in responses] if prompt != "Q" else 1 / 0

def length(prompt, responses, row):
    return [len(response) for response in responses]
"""


def test_the_score_of_the_group_is_added_with_its_weight() -> None:
    reward = RewardConfig(fn="math", wrong_reward=0.0, weights=[2.0], group_fn="self_consistency", group_weight=4.0)
    out, stats = run(VerifierConfig(reward=reward), responses(*SAME))
    assert out["rewards"].tolist() == [2.0 + 2.0, 2.0 + 2.0, 1.0, 0.0]
    assert stats["score_math"] == (2.0, 4.0) and stats["score_self_consistency"] == (1.25, 4.0)
    assert stats["accuracy"] == (2.0, 4.0) and stats["failed"] == (0.0, 4.0)


def test_a_group_reward_alone_has_no_scores_by_name() -> None:
    out, stats = run(VerifierConfig(reward=RewardConfig(fn="none", group_fn="self_consistency")), responses(*SAME))
    assert out["rewards"].tolist() == [0.5, 0.5, 0.25, 0.0]
    assert set(stats) == {"reward", "reward_sq", "failed", "verifier_error", "verifier_timeout"}


def test_formats_are_judged_beside_the_group() -> None:
    reward = RewardConfig(wrong_reward=0.0, wrong_formatted_reward=0.5, format_reward=".*#.*", group_fn="diversity")
    out, stats = run(VerifierConfig(reward=reward), responses("#### 72", "#### 72", "#### 71"))
    assert stats["format_ok"] == (3.0, 3.0) and stats["score_math"] == (2.5, 3.0)
    assert out["rewards"].tolist() == pytest.approx([1 + 1 / 3, 1 + 1 / 3, 0.5 + 2 / 3])


def test_without_a_function_all_scores_are_zero() -> None:
    config = VerifierConfig(RewardConfig(fn="none", check_verifier_status=True), PPOConfig(reward_output_bias=-1.0))
    out, stats = run(config, responses("a", "b"))
    assert out["rewards"].tolist() == [1.0, 1.0] and stats["failed"] == (0.0, 2.0)


def test_a_function_that_fails_leaves_its_prompt_without_rewards(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(FUNCTIONS)
    reports: list[str] = []
    reward = RewardConfig(fn="none", group_fn=f"{tmp_path}/mine.py:first_fails")
    out, stats = run(VerifierConfig(reward=reward), responses("a", "bb"), reports)
    assert len(out) == 0 and stats["failed"] == (2.0, 2.0) and stats["verifier_error"] == (2.0, 2.0)
    (report,) = reports
    assert report.startswith(f"{tmp_path}/mine.py:first_fails, response 0 to prompt 0: ZeroDivisionError")
    assert "in first_fails" in report


def test_the_best_responses_are_selected_after_the_group_is_scored(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(FUNCTIONS)
    reward = RewardConfig(fn="none", group_fn=f"{tmp_path}/mine.py:length")
    ppo = PPOConfig(generation_size=4, group_size=2)
    out, stats = run(VerifierConfig(reward, ppo), responses("a", "dddd", "ccc", "bb"))
    assert out.ids == (RowId(0, 1), RowId(0, 2)) and out["rewards"].tolist() == [4.0, 3.0]
    assert stats["reward"] == (10.0, 4.0)


def test_scores_of_a_reward_model_are_added() -> None:
    batch = responses("#### 72", "#### 71").with_scalars("model_scores", torch.tensor([0.5, -1.5]))
    ppo = PPOConfig(reward_output_bias=0.5, reward_output_scaling=2.0, rm_output_scaling=3.0)
    out, stats = run(VerifierConfig(ppo=ppo), batch)
    assert out["rewards"].tolist() == [1.0 + 1.5, -3.0 - 4.5] and stats["reward"] == (-5.0, 2.0)


def test_a_score_that_is_not_finite_leaves_no_reward() -> None:
    batch = responses("a", "b", "c")
    models = torch.tensor([1.0, torch.nan, torch.inf])
    out, stats = rewards_of(batch, torch.zeros(3, dtype=torch.float64), PPOConfig(), model_scores=models)
    assert out.ids == (RowId(0, 0),) and stats["failed"] == (2.0, 3.0)
