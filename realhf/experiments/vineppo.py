"""VinePPO: PPO with values from Monte Carlo rollouts instead of a critic."""

from dataclasses import dataclass
from functools import partial

from realhf.algorithms.policy_gradient.config import Advantage, PPOConfig, VineConfig
from realhf.api.codec import to_plain
from realhf.api.config import KLPlace, LossAggregation, MFCConfig, RewardConfig, opt
from realhf.api.graph import MFC, InterfaceSpec, Kind
from realhf.experiments.ppo_math import PPOMathExperiment


@dataclass
class VinePPOExperiment(PPOMathExperiment):
    """PPO with Monte Carlo values."""

    # Kazemnejad et al. 2024 (arXiv 2410.01679) and its code: groups of 8, KL loss summed over each response
    ppo: PPOConfig = opt(partial(PPOConfig, group_size=8, disable_value=True, advantage=Advantage["precomputed"],
                                 adv_norm_unbiased=True, kl_in=KLPlace.loss, kl_ctl=1e-4, kl_loss_clip=10.0,
                                 kl_loss_aggregation=LossAggregation.seq_sum, mask_no_eos_with_zero=True),
                         "the algorithm")  # fmt: skip
    vine: VineConfig = opt(VineConfig, "values of states")
    reward: RewardConfig = opt(lambda: RewardConfig(wrong_reward=0.0), "the verifier")
    value_gen: MFCConfig = opt(MFCConfig, "rollouts from states")
    value_rew: MFCConfig = opt(MFCConfig, "values of states")
    vine_adv: MFCConfig = opt(MFCConfig, "advantages")

    def more_mfcs(self) -> list[MFC]:
        options = {"ppo": to_plain(self.ppo), "vine": to_plain(self.vine)}
        rollouts = InterfaceSpec("vine_rollouts", options)
        values = InterfaceSpec("vine_values", {**options, "reward": to_plain(self.reward)})
        advantages = InterfaceSpec("vine_advantages", options["ppo"])
        selected = ("rewards",) if self.drops_rows else ()
        outputs = ("state_starts", "rollouts", "rollout_lengths", "rollout_truncated")
        response, batch = ("tokens", "prompt_mask"), self._batch
        return [
            MFC("value_gen", "actor", Kind.GENERATE, rollouts, (*response, *selected), outputs, batch),
            MFC("value_rew", None, Kind.INFERENCE, values, (*response, "row", *outputs), ("state_values",), batch),
            MFC("vine_adv", None, Kind.INFERENCE, advantages,
                ("prompt_mask", "rewards", "truncated", "state_starts", "state_values"), ("advantages",), batch),
        ]  # fmt: skip
