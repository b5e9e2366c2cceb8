"""VinePPO: PPO whose values are found by rollouts from the states between steps instead of by a critic."""

from dataclasses import dataclass

from realhf.algorithms.policy_gradient.config import Advantage, PPOConfig, VineConfig
from realhf.api.codec import to_plain
from realhf.api.config import KLPlace, LossAggregation, MFCConfig, RewardConfig, opt
from realhf.api.graph import MFC, InterfaceSpec, Kind
from realhf.experiments.ppo_math import PPOMathExperiment


def vineppo() -> PPOConfig:
    """Kazemnejad et al. 2024 (arXiv 2410.01679) and its code: answers of 8, KL in the loss summed over an answer."""
    return PPOConfig(group_size=8, disable_value=True, advantage=Advantage["precomputed"], adv_norm_unbiased=True,
                     kl_in=KLPlace.loss, kl_ctl=1e-4, kl_loss_aggregation=LossAggregation.seq_sum, kl_loss_clip=10.0,
                     mask_no_eos_with_zero=True)  # fmt: skip


@dataclass
class VinePPOExperiment(PPOMathExperiment):
    """PPO with values by Monte Carlo."""

    ppo: PPOConfig = opt(vineppo, "the algorithm")
    vine: VineConfig = opt(VineConfig, "values of states")
    reward: RewardConfig = opt(lambda: RewardConfig(wrong_reward=0.0), "the verifier")
    value_gen: MFCConfig = opt(MFCConfig, "rollouts from states")
    value_rew: MFCConfig = opt(MFCConfig, "values of states")
    vine_adv: MFCConfig = opt(MFCConfig, "advantages")

    def more_mfcs(self) -> list[MFC]:
        ppo, vine, reward = to_plain(self.ppo), to_plain(self.vine), to_plain(self.reward)
        rollouts = InterfaceSpec("vine_rollouts", {"ppo": ppo, "vine": vine})
        values = InterfaceSpec("vine_values", {"ppo": ppo, "vine": vine, "reward": reward})
        kept = ("rewards",) if self.drops_rows else ()
        drawn = ("state_starts", "rollouts", "rollout_lengths", "rollout_truncated")
        answer, batch = ("tokens", "prompt_mask"), self._batch
        return [
            MFC("value_gen", "actor", Kind.GENERATE, rollouts, (*answer, *kept), drawn, batch),
            MFC("value_rew", None, Kind.INFERENCE, values, (*answer, "row", *drawn), ("state_values",), batch),
            MFC("vine_adv", None, Kind.INFERENCE, InterfaceSpec("vine_advantages", ppo),
                ("prompt_mask", "rewards", "truncated", "state_starts", "state_values"), ("advantages",), batch),
        ]  # fmt: skip

    def placements(self) -> dict[str, MFCConfig]:
        calls = {"value_gen": self.value_gen, "value_rew": self.value_rew, "vine_adv": self.vine_adv}
        return {**super().placements(), **calls}

    def problems(self) -> list[str]:
        vine = self.vine
        checks = [
            (vine.n_rollouts >= 1, f"vine.n_rollouts must be positive, got {vine.n_rollouts}"),
            (
                vine.max_states is None or vine.max_states >= 1,
                f"vine.max_states must be positive, got {vine.max_states}",
            ),
        ]
        return super().problems() + [line for holds, line in checks if not holds]
