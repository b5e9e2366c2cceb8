"""PPO with verified rewards: maths answers, programs, or any reward function of the user."""

from dataclasses import dataclass, replace
from math import inf

from realhf.api.config import ModelSpec, RewardConfig, opt
from realhf.api.config.preference import EnsembleConfig, ScoreConfig
from realhf.api.experiment import RoleSpec, Task
from realhf.api.graph import MFC
from realhf.experiments.options.checks import reward_problems, score_range, unmet
from realhf.experiments.options.models import episode_rewards, reward_task, verifier_call
from realhf.experiments.ppo import PPOExperiment


@dataclass
class PPOMathExperiment(PPOExperiment):
    """PPO with verified rewards instead of a reward model."""

    reward: RewardConfig = opt(RewardConfig, "the verifier")

    @property
    def task(self) -> Task:
        return Task.episode if self.env.cls else reward_task(self.reward)

    def reward_mfcs(self) -> list[MFC]:
        if self.env.cls:
            return [episode_rewards("rew_inf", self.ppo, self._batch)]
        return [verifier_call("rew_inf", self.reward, self.ppo, self._batch)]

    def without_selection(self) -> "PPOMathExperiment":
        reward = replace(self.reward, check_verifier_status=False)
        return replace(self, ppo=super().without_selection().ppo, reward=reward)

    def reward_roles(self) -> dict[str, RoleSpec]:
        return {}

    def score_range(self) -> tuple[float, float]:
        return (-inf, inf) if self.env.cls else score_range(self.reward)

    def problems(self) -> list[str]:
        return super().problems() + ([] if self.env.cls else reward_problems(self.reward)) + unmet([
            (not self.env.cls or self.reward == RewardConfig(),
             "env.cls and reward.* are set: rewards come from the environment"),
            ((self.rew, self.score) == (ModelSpec(), ScoreConfig()),
             "rew or score have options, but rewards come from reward.fn; for a reward model use ppo"),
            (self.ensemble == EnsembleConfig(),
             "ensemble has options, but rewards come from reward.fn; for reward models use ppo"),
        ])  # fmt: skip


@dataclass
class PPOCodeExperiment(PPOMathExperiment):
    """PPO with rewards from running code in a sandbox."""

    reward: RewardConfig = opt(lambda: RewardConfig(fn="code"), "the verifier")
