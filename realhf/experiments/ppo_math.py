"""PPO with verified rewards: maths answers, programs, or any reward function of the user."""

from dataclasses import dataclass, replace
from math import inf

from realhf.api.config import EnvConfig, GenerationConfig, ModelSpec, RewardConfig, opt
from realhf.api.config.preference import EnsembleConfig, ScoreConfig
from realhf.api.experiment import RoleSpec, Task
from realhf.api.graph import MFC
from realhf.api.machine import EnvironmentLoad
from realhf.environments.loading import is_async_class
from realhf.experiments.options.checks import env_problems, env_warnings, reward_problems, score_range, unmet
from realhf.experiments.options.models import episode_call, episode_rewards, reward_task, verifier_call
from realhf.experiments.ppo import PPOExperiment


@dataclass
class PPOMathExperiment(PPOExperiment):
    """PPO with verified rewards instead of a reward model."""

    reward: RewardConfig = opt(RewardConfig, "the verifier")
    env: EnvConfig = opt(EnvConfig, "an environment instead of the verifier: multi-turn rollouts")

    @property
    def task(self) -> Task:  # type: ignore[override]
        return Task.episode if self.env.cls else reward_task(self.reward)

    @property
    def drops_rows(self) -> bool:
        return bool(self.env.cls) or super().drops_rows

    def rollout_mfc(self) -> MFC:
        if not self.env.cls:
            return super().rollout_mfc()
        return episode_call("actor_gen", "actor", self.env, self.ppo.gen, self.samples_per_prompt(), self._batch)

    def eval_rollout_mfc(self, sampling: GenerationConfig) -> MFC:
        if not self.env.cls:
            return super().eval_rollout_mfc(sampling)
        env = replace(self.env, partial_tokens=None)
        return episode_call("eval_gen", "actor", env, sampling, sampling.n, self._batch)

    def reward_mfcs(self) -> list[MFC]:
        if self.env.cls:
            return [episode_rewards("rew_inf", self.ppo, self._batch)]
        return [verifier_call("rew_inf", self.reward, self.ppo, self._batch)]

    def planned_sampling(self) -> GenerationConfig:
        if not self.env.cls:
            return self.ppo.gen
        return replace(self.ppo.gen, max_new_tokens=self.env.max_len(0, self.ppo.gen.max_new_tokens))

    def expected_new_tokens(self) -> float | None:
        if not self.env.cls:
            return super().expected_new_tokens()
        turns = self.planner.env_turns or self.env.max_turns
        return self.planner.new_tokens or 2 * turns * self.ppo.gen.max_new_tokens

    def max_episodes(self) -> int:
        return (self.env.max_episodes or 2 * self.ppo.gen.max_num_seqs) if self.env.cls else 0

    def environment_load(self) -> EnvironmentLoad | None:
        env, planner = self.env, self.planner
        if not env.cls or not planner.env_latency:
            return None
        per_process = env.max_concurrency if is_async_class(env.cls) else 1
        turns = planner.env_turns or env.max_turns
        return EnvironmentLoad(turns, planner.env_latency, env.workers, per_process, self.max_episodes())

    def without_selection(self) -> "PPOMathExperiment":
        reward = replace(self.reward, check_verifier_status=False)
        return replace(self, ppo=super().without_selection().ppo, reward=reward)

    def reward_roles(self) -> dict[str, RoleSpec]:
        return {}

    def score_range(self) -> tuple[float, float]:
        return (-inf, inf) if self.env.cls else score_range(self.reward)

    def warnings(self) -> list[str]:
        return super().warnings() + (env_warnings(self.env, self.ppo) if self.env.cls else [])

    def problems(self) -> list[str]:
        rewards = env_problems(self.env, self.ppo, self.reward) if self.env.cls else reward_problems(self.reward)
        return super().problems() + rewards + unmet([
            (not self.env.cls or type(self).more_mfcs is PPOMathExperiment.more_mfcs,
             "env.cls: this algorithm is for single responses; use grpo, rloo, reinforce-pp or ppo-math"),
            (not (self.env.partial_tokens and self.max_staleness),
             "env.partial_tokens and max_staleness are set: a partial rollout already uses older weights"),
            (not (self.env.partial_tokens and self.ppo.dynamic_sampling),
             "env.partial_tokens and ppo.dynamic_sampling are set: unfinished prompts would be replaced"),
            ((self.rew, self.score) == (ModelSpec(), ScoreConfig()),
             "rew or score have options, but rewards come from reward.fn; for a reward model use ppo"),
            (self.ensemble == EnsembleConfig(),
             "ensemble has options, but rewards come from reward.fn; for reward models use ppo"),
        ])  # fmt: skip


@dataclass
class PPOCodeExperiment(PPOMathExperiment):
    """PPO with rewards from running code in a sandbox."""

    reward: RewardConfig = opt(lambda: RewardConfig(fn="code"), "the verifier")
