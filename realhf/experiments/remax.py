"""ReMax: the baseline is the reward of the greedy response, so the graph generates and verifies twice."""

from dataclasses import dataclass, replace
from functools import partial

from realhf.algorithms.policy_gradient.config import Advantage, PolicyLoss, PPOConfig
from realhf.api.codec import to_plain
from realhf.api.config import LossAggregation, MFCConfig, opt
from realhf.api.graph import MFC, InterfaceSpec, Kind
from realhf.experiments.ppo_math import PPOMathExperiment


@dataclass
class ReMaxExperiment(PPOMathExperiment):
    """Policy gradient with a greedy baseline."""

    # Li et al. 2023 (arXiv 2310.10505): the policy gradient with the reward of the greedy response as baseline
    ppo: PPOConfig = opt(partial(PPOConfig, group_size=1, disable_value=True, advantage=Advantage["greedy_baseline"],
                                 adv_norm=False, policy_loss=PolicyLoss["reinforce"], ppo_n_minibatches=1,
                                 loss_aggregation=LossAggregation.seq_sum), "the algorithm")  # fmt: skip
    greedy_gen: MFCConfig = opt(MFCConfig, "greedy responses")
    greedy_rew: MFCConfig = opt(MFCConfig, "rewards of greedy responses")

    def more_mfcs(self) -> list[MFC]:
        greedy = InterfaceSpec("generation", to_plain(replace(self.ppo.gen, greedy=True, keep_first=None)))
        (reward,) = self.without_selection().reward_mfcs()
        aliases = {"greedy_tokens": "tokens", "greedy_prompt_mask": "prompt_mask"}
        others = tuple(key for key in reward.inputs if key not in aliases.values())
        return [
            MFC("greedy_gen", "actor", Kind.GENERATE, greedy, ("prompts",), tuple(aliases), self._batch,
                aliases=tuple(aliases.items()), per_prompt=True),
            replace(reward, name="greedy_rew", inputs=(*aliases, *others), outputs=("baseline",),
                    aliases=(*aliases.items(), ("baseline", "rewards"))),
        ]  # fmt: skip
