"""PPO with a verifier: maths answers judged in a child process, or any reward function of the user's."""

from dataclasses import dataclass, replace

from realhf.api.codec import to_plain
from realhf.api.config import ModelSpec, RewardConfig, opt
from realhf.api.config.ensemble import EnsembleConfig
from realhf.api.config.preference import ScoreConfig
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

    def reward_mfc(self) -> MFC:
        interface = InterfaceSpec("verifier", {"reward": to_plain(self.reward), "ppo": to_plain(self.ppo)})
        return MFC("rew_inf", None, Kind.INFERENCE, interface, ("tokens", "prompt_mask", "row"), ("rewards",),
                   self._batch)  # fmt: skip

    def reward_mfcs(self) -> list[MFC]:
        return [self.reward_mfc()]

    def as_judge(self) -> "PPOMathExperiment":
        judge = super().as_judge()
        assert isinstance(judge, PPOMathExperiment)
        return replace(judge, reward=replace(self.reward, check_verifier_status=False))

    def reward_roles(self) -> dict[str, RoleSpec]:
        return {}

    def problems(self) -> list[str]:
        problems = super().problems() + reward_problems(self.reward)
        if (self.rew, self.score) != (ModelSpec(), ScoreConfig()):
            problems.append("rew or score have options, but rewards come from reward.fn here; for a model use ppo")
        if self.ensemble != EnsembleConfig():
            problems.append("ensemble has options, but rewards come from reward.fn here; for models use ppo")
        return problems
