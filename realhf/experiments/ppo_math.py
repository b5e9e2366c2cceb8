"""PPO with a verifier: maths answers judged in a child process, or any reward function of the user's."""

from dataclasses import dataclass

from realhf.api.codec import to_plain
from realhf.api.config import ModelSpec, RewardConfig, opt
from realhf.api.experiment import RoleSpec, Task
from realhf.api.graph import MFC, InterfaceSpec, Kind
from realhf.experiments.ppo import PPOExperiment
from realhf.rewards.pool import check_reward_fn


@dataclass
class PPOMathExperiment(PPOExperiment):
    """PPO with verified rewards instead of a reward model."""

    reward: RewardConfig = opt(RewardConfig, "the verifier")

    @property
    def task(self) -> Task:  # type: ignore[override]
        return Task.math if self.reward.fn == "math" else Task.prompt

    def reward_mfc(self) -> MFC:
        interface = InterfaceSpec("verifier", {"reward": to_plain(self.reward), "ppo": to_plain(self.ppo)})
        return MFC("rew_inf", None, Kind.INFERENCE, interface, ("tokens", "prompt_mask", "row"), ("rewards",),
                   self._batch)  # fmt: skip

    def reward_roles(self) -> dict[str, RoleSpec]:
        return {}

    def problems(self) -> list[str]:
        reward = self.reward
        checks = [
            (reward.timeout > 0, f"reward.timeout must be positive, got {reward.timeout}"),
            (reward.processes >= 1, f"reward.processes must be positive, got {reward.processes}"),
            (self.rew == ModelSpec(), "rew has options, but rewards come from reward.fn here; for a model use ppo"),
        ]
        return super().problems() + [line for holds, line in checks if not holds] + check_reward_fn(reward.fn)
