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
from realhf.rewards.group.presets import compares
from realhf.rewards.registry import fns_of


@dataclass
class PPOMathExperiment(PPOExperiment):
    """PPO with verified rewards, and those of a reward model with ``rew.path``."""

    reward: RewardConfig = opt(RewardConfig, "the verifier")

    @property
    def task(self) -> Task:
        return Task.episode if self.env.cls else reward_task(self.reward)

    def reward_mfcs(self) -> list[MFC]:
        if self.env.cls:
            return [episode_rewards("rew_inf", self.ppo, self._batch)]
        scores = self._reward_models.score_calls(self._batch) if self._reward_models.is_set else []
        outputs = scores[-1].outputs if scores else ()
        return [*scores, verifier_call("rew_inf", self.reward, self.ppo, self._batch, outputs)]

    def without_selection(self) -> "PPOMathExperiment":
        reward = replace(self.reward, check_verifier_status=False)
        return replace(self, ppo=super().without_selection().ppo, reward=reward)

    def reward_roles(self) -> dict[str, RoleSpec]:
        return self._reward_models.roles() if self._reward_models.is_set else {}

    def score_range(self) -> tuple[float, float]:
        is_bounded = not self.env.cls and not self._reward_models.is_set
        return score_range(self.reward) if is_bounded else (-inf, inf)

    def n_rewards(self) -> int:
        return 1 if self.env.cls else len(fns_of(self.reward)) + bool(self.reward.group_fn)

    def problems(self) -> list[str]:
        models = self._reward_models
        return super().problems() + ([] if self.env.cls else self._reward_problems()) + unmet([
            (not self.env.cls or self.reward == RewardConfig(),
             "env.cls and reward.* are set: rewards come from the environment"),
            (models.is_set or self.rew == ModelSpec(), "rew has options, but rew.path and rew.config are not set"),
            (models.is_set or (self.score, self.ensemble) == (ScoreConfig(), EnsembleConfig()),
             "score or ensemble has options, but there is no reward model: set rew.path or ensemble.members"),
            (models.is_set or self.ppo.rm_output_scaling == 1,
             "ppo.rm_output_scaling needs a reward model: set rew.path or ensemble.members"),
            (not (models.is_set and self.env.cls),
             "env.cls and a reward model (rew, ensemble) are set: use the experiment ppo"),
            (not models.is_set or self._judges_responses_only,
             "a reward model (rew, ensemble) in addition to reward.fn: use grpo, rloo, reinforce-pp or ppo-math"),
        ])  # fmt: skip

    @property
    def _judges_responses_only(self) -> bool:
        """Whether the only calls that need rewards are those of the responses in training."""
        return type(self).more_mfcs is PPOExperiment.more_mfcs

    def _reward_problems(self) -> list[str]:
        group_fn, n_eval = self.reward.group_fn, self.evaluation.n if self.dataset.holds_out else None
        return reward_problems(self.reward, self.samples_per_prompt()) + unmet([
            (not group_fn or self._judges_responses_only,
             f"reward.group_fn={group_fn}: this algorithm rewards single responses; use grpo, rloo, reinforce-pp or "
             "ppo-math"),
            (not group_fn or not compares(group_fn) or n_eval != 1,
             f"reward.group_fn={group_fn} compares responses, but evaluation.n=1; set evaluation.n=4 "
             "evaluation.greedy=False"),
        ])  # fmt: skip

    def warnings(self) -> list[str]:
        has_signal = self.env.cls or self.teacher_role or self.n_rewards() or self._reward_models.is_set
        constant = ["reward.fn=none without reward.group_fn or a reward model (rew.path): all rewards are equal"]
        return super().warnings() + ([] if has_signal else constant)


@dataclass
class PPOCodeExperiment(PPOMathExperiment):
    """PPO with rewards from running code in a sandbox."""

    reward: RewardConfig = opt(lambda: RewardConfig(fn="code"), "the verifier")
