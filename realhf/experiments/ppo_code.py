"""PPO with rewards from the unit tests of each dataset row."""

from dataclasses import dataclass

from realhf.api.config import RewardConfig, opt
from realhf.experiments.ppo_math import PPOMathExperiment


@dataclass
class PPOCodeExperiment(PPOMathExperiment):
    """PPO with rewards from running code in a sandbox."""

    reward: RewardConfig = opt(lambda: RewardConfig(fn="code"), "the verifier")
