"""PPO with verified rewards: maths answers, or any reward function of the user."""

from dataclasses import dataclass, replace

from realhf.api.codec import to_plain
from realhf.api.config import ModelSpec, RewardConfig, opt
from realhf.api.config.preference import EnsembleConfig, ScoreConfig
from realhf.api.experiment import RoleSpec, Task
from realhf.api.graph import MFC, InterfaceSpec, Kind
from realhf.experiments.options.verifier import reward_problems, reward_task
from realhf.experiments.ppo import PPOExperiment


@dataclass
class PPOMathExperiment(PPOExperiment):
    """PPO with verified rewards instead of a reward model."""

    reward: RewardConfig = opt(RewardConfig, "the verifier")

    @property
    def task(self) -> Task:  # type: ignore[override]
        return reward_task(self.reward)

    def reward_mfcs(self) -> list[MFC]:
        interface = InterfaceSpec("verifier", {"reward": to_plain(self.reward), "ppo": to_plain(self.ppo)})
        inputs = ("tokens", "prompt_mask", "row")
        return [MFC("rew_inf", None, Kind.INFERENCE, interface, inputs, ("rewards",), self._batch)]

    def without_selection(self) -> "PPOMathExperiment":
        unfiltered = super().without_selection()
        assert isinstance(unfiltered, PPOMathExperiment)
        return replace(unfiltered, reward=replace(self.reward, check_verifier_status=False))

    def reward_roles(self) -> dict[str, RoleSpec]:
        return {}

    def problems(self) -> list[str]:
        checks = [
            ((self.rew, self.score) == (ModelSpec(), ScoreConfig()),
             "rew or score have options, but rewards come from reward.fn; for a reward model use ppo"),
            (self.ensemble == EnsembleConfig(),
             "ensemble has options, but rewards come from reward.fn; for reward models use ppo"),
        ]  # fmt: skip
        return super().problems() + reward_problems(self.reward) + [line for holds, line in checks if not holds]
