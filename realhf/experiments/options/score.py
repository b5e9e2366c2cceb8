"""Scoring with a reward model: its interface, and the normalisation of its scores."""

import json
from dataclasses import replace
from pathlib import Path

from realhf.algorithms.policy_gradient.config import PPOConfig
from realhf.api.codec import to_plain
from realhf.api.config import ModelSpec
from realhf.api.config.preference import RewardModelType, ScoreConfig
from realhf.api.graph import InterfaceSpec

COMPARED = (RewardModelType.pairs, RewardModelType.ranked)
STATISTICS = "evaluation.json"


def score_interface(score: ScoreConfig, rew: ModelSpec, ppo: PPOConfig) -> InterfaceSpec:
    """Return the interface that scores responses with the reward model ``rew``."""
    if score.type not in COMPARED:
        return InterfaceSpec("labelled_rw", {"ppo": to_plain(ppo), "score": to_plain(score)})
    moments = score_moments(rew) if score.normalise else None
    return InterfaceSpec("paired_rw", to_plain(normalised(ppo, *moments) if moments else ppo))


def normalised(ppo: PPOConfig, mean: float, std: float) -> PPOConfig:
    """Return the options with bias and scaling applied to ``(score - mean) / std``."""
    bias, scaling = mean + ppo.reward_output_bias * std, ppo.reward_output_scaling / std
    return replace(ppo, reward_output_bias=bias, reward_output_scaling=scaling)


def score_moments(rew: ModelSpec) -> tuple[float, float] | None:
    """Return the mean and the unbiased standard deviation of a model's scores on held-out rows, or None.

    ``rw`` writes them to the folder of the model if it has held-out rows.
    """
    file = Path(rew.path or "") / STATISTICS
    if not file.is_file():
        return None
    stored = json.loads(file.read_text())
    mean, square = (stored["metrics"].get(f"rw_eval/{name}") for name in ("score", "score_sq"))
    count = stored["counts"].get("rw_eval/score", 0.0)
    if mean is None or square is None or count < 2 or square <= mean**2:
        return None
    return mean, ((square - mean**2) * count / (count - 1)) ** 0.5


def score_problems(score: ScoreConfig, rew: ModelSpec) -> list[str]:
    """Return one line per invalid option."""
    if not score.normalise:
        return []
    if score.type not in COMPARED:
        return [f"score.normalise=True is for unbounded scores; score.type={score.type.name} returns probabilities"]
    if score_moments(rew) is None:
        file = Path(rew.path or "") / STATISTICS
        advice = "train the reward model with dataset.eval_path or dataset.eval_fraction"
        return [f"score.normalise=True: no scores of held-out rows in {file}; {advice}"]
    return []
