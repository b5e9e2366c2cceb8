"""The interface of reward models, and score normalisation."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from realhf.algorithms import build_interface
from realhf.algorithms.policy_gradient.config import PPOConfig
from realhf.api.config import ModelSpec
from realhf.api.config.preference import RewardModelType, ScoreConfig
from realhf.base.errors import UserError
from realhf.data.protocols import InterfaceContext
from realhf.experiments.options.models import normalised, score_call, score_moments
from realhf.experiments.ppo import PPOExperiment
from realhf.experiments.ppo_math import PPOMathExperiment

CONTEXT = InterfaceContext(seed=1, tokenizer=None, run_root=Path("."))


def reward_model(folder: Path, mean: float, square: float, count: float) -> ModelSpec:
    found = {"step": 3, "metrics": {"rw_eval/score": mean, "rw_eval/score_sq": square}}
    (folder / "evaluation.json").write_text(json.dumps({**found, "counts": {"rw_eval/score": count}}))
    return ModelSpec(str(folder))


@pytest.mark.parametrize("kind", RewardModelType)
def test_interface_of_each_type(kind: RewardModelType) -> None:
    ppo = PPOConfig(reward_output_bias=0.5)
    interface = build_interface(score_call("rew", ScoreConfig(kind), ModelSpec(), ppo, 1).interface, CONTEXT)
    config = interface.config if kind.name in ("pairs", "ranked") else interface.config.ppo
    assert config == ppo and PPOExperiment(score=ScoreConfig(kind)).graph()["rew_inf"].outputs == ("rewards",)


@given(st.floats(-5, 5), st.floats(0.1, 5), st.floats(-5, 5), st.floats(0.1, 3), st.floats(-2, 2))
def test_bias_and_scaling_apply_to_normalised_scores(
    mean: float, std: float, bias: float, scaling: float, score: float
) -> None:
    ppo = normalised(PPOConfig(reward_output_bias=bias, reward_output_scaling=scaling), mean, std)
    reward = (score - ppo.reward_output_bias) * ppo.reward_output_scaling
    assert reward == pytest.approx(((score - mean) / std - bias) * scaling, abs=1e-9)


def test_moments_of_held_out_scores(tmp_path: Path) -> None:
    """Scores 1, 2, 6: mean 3, unbiased variance 7."""
    rew = reward_model(tmp_path, 3.0, 41 / 3, 3.0)
    assert score_moments(rew) == pytest.approx((3.0, 7**0.5))
    spec = PPOExperiment(rew=rew, score=ScoreConfig(normalise=True)).graph()["rew_inf"].interface
    assert spec.config["reward_output_bias"] == pytest.approx(3.0)
    assert spec.config["reward_output_scaling"] == pytest.approx(7**-0.5)


@pytest.mark.parametrize(
    "text", ["{", "[]", "{}", '{"metrics": {}}', "[" * 100_000, '{"metrics": 1, "counts": {}}', "\xff"]
)
def test_damaged_statistics_are_one_problem(text: str, tmp_path: Path) -> None:
    (tmp_path / "evaluation.json").write_text(text, encoding="latin-1")
    with pytest.raises(UserError, match="evaluation.json is damaged .*; evaluate the reward model again") as caught:
        score_moments(ModelSpec(str(tmp_path)))
    assert len(caught.value.problems) == 1


def test_scores_that_cannot_be_normalised(tmp_path: Path) -> None:
    experiment = PPOExperiment(rew=ModelSpec(str(tmp_path)), score=ScoreConfig(normalise=True))
    (problem,) = experiment.problems()
    assert f"no scores of held-out rows in {tmp_path}/evaluation.json; train the reward model with" in problem
    experiment.rew = reward_model(tmp_path, 2.0, 4.0, 5.0)  # all scores are equal
    assert len(experiment.problems()) == 1
    experiment.score.type = RewardModelType.process
    assert "score.type=process returns probabilities" in experiment.problems()[0]
    verified = PPOMathExperiment(score=ScoreConfig(normalise=True)).problems()
    assert "score or ensemble has options, but there is no reward model: set rew.path or ensemble.members" in verified
