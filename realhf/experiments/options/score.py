"""How PPO uses a reward model: which interface serves it, and how its scores are brought to one scale."""

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
    """Return what scores answers with the reward model ``rew``."""
    if score.type not in COMPARED:
        return InterfaceSpec("labelled_rw", {"ppo": to_plain(ppo), "score": to_plain(score)})
    moments = score_moments(rew) if score.normalise else None
    return InterfaceSpec("paired_rw", to_plain(normalised(ppo, *moments) if moments else ppo))


def normalised(ppo: PPOConfig, mean: float, std: float) -> PPOConfig:
    """Return the options under which ``(score - mean) / std`` is what bias and scaling act on."""
    bias, scaling = mean + ppo.reward_output_bias * std, ppo.reward_output_scaling / std
    return replace(ppo, reward_output_bias=bias, reward_output_scaling=scaling)


def score_moments(rew: ModelSpec) -> tuple[float, float] | None:
    """Return mean and unbiased standard deviation of a model's scores of held-out answers; None where they are unknown.

    They are beside the weights of a model that ``rw`` saved with held-out rows.
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
    """Return what the options of scoring contradict, one line each."""
    if not score.normalise:
        return []
    if score.type not in COMPARED:
        return [f"score.normalise=True is for scores of any scale; those of score.type={score.type.name} are shares"]
    if score_moments(rew) is None:
        file = Path(rew.path or "") / STATISTICS
        advice = "train the reward model with dataset.eval_path or dataset.eval_fraction"
        return [f"score.normalise=True: there are no scores of held-out answers in {file}; {advice}"]
    return []
