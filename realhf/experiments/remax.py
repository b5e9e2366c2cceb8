"""ReMax: the baseline is the reward of the greedy response, which the graph generates and verifies too."""

from dataclasses import dataclass, replace

from realhf.algorithms.policy_gradient.config import Advantage, PolicyLoss, PPOConfig
from realhf.api.codec import to_plain
from realhf.api.config import LossAggregation, MFCConfig, opt
from realhf.api.graph import MFC, InterfaceSpec, Kind
from realhf.experiments.ppo_math import PPOMathExperiment


def remax() -> PPOConfig:
    """Li et al. 2023 (arXiv 2310.10505): the policy gradient with the reward of the greedy response as baseline."""
    return PPOConfig(group_size=1, disable_value=True, advantage=Advantage["greedy_baseline"], adv_norm=False,
                     policy_loss=PolicyLoss["reinforce"], loss_aggregation=LossAggregation.seq_sum,
                     ppo_n_minibatches=1)  # fmt: skip


@dataclass
class ReMaxExperiment(PPOMathExperiment):
    """Policy gradient with a greedy baseline."""

    ppo: PPOConfig = opt(remax, "the algorithm")
    greedy_gen: MFCConfig = opt(MFCConfig, "greedy responses")
    greedy_rew: MFCConfig = opt(MFCConfig, "rewards of greedy responses")

    def more_mfcs(self) -> list[MFC]:
        greedy = InterfaceSpec("generation", to_plain(replace(self.ppo.gen, greedy=True)))
        reward = self.as_judge().reward_mfc()
        answer = (("greedy_tokens", "tokens"), ("greedy_prompt_mask", "prompt_mask"))
        keys = tuple(key for key, _ in answer)
        others = tuple(key for key in reward.inputs if key not in dict(answer).values())
        return [
            MFC("greedy_gen", "actor", Kind.GENERATE, greedy, ("prompts",), keys, self._batch, aliases=answer,
                per_prompt=True),
            replace(reward, name="greedy_rew", inputs=(*keys, *others), outputs=("baseline",),
                    aliases=(*answer, ("baseline", "rewards"))),
        ]  # fmt: skip

    def placements(self) -> dict[str, MFCConfig]:
        return {**super().placements(), "greedy_gen": self.greedy_gen, "greedy_rew": self.greedy_rew}
