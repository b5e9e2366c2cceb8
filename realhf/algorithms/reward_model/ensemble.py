"""Rewards from several reward models: reads what each member gave an answer, and makes one score of them."""

from dataclasses import dataclass

import numpy as np
import torch

from realhf.algorithms.policy_gradient.config import PPOConfig
from realhf.algorithms.policy_gradient.rewards import attach_rewards_and_filter
from realhf.algorithms.stats import mean_of
from realhf.api.config import opt
from realhf.api.config.ensemble import EnsembleConfig
from realhf.api.messages import State, Stats
from realhf.data.batch import SequenceBatch
from realhf.data.protocols import Engine, InterfaceContext
from realhf.ops.ensemble import check_scores, combine, variance


@dataclass
class EnsembleRewardConfig:
    ensemble: EnsembleConfig = opt(EnsembleConfig, "the members and what is made of their scores")
    ppo: PPOConfig = opt(PPOConfig, "scaling and bias of rewards, which answers stay")


class EnsembleReward:
    """Makes the scalar ``rewards`` of the scalars ``score_0``, ``score_1``, ...; bias and scaling as in PairedReward.

    Reads ``prompt_mask`` too, for answers are selected here. Statistics count all answers: ``reward``, ``variance``
    between members, and for member i ``lowest_i``, the share of answers that no other scores lower (of equal ones the
    first counts). A score that is not finite is a ValueError.
    """

    config_type = EnsembleRewardConfig

    def __init__(self, config: EnsembleRewardConfig, context: InterfaceContext) -> None:
        self.config = config

    def inference(self, engine: Engine | None, batch: SequenceBatch, state: State) -> tuple[SequenceBatch, Stats]:
        ensemble, ppo = self.config.ensemble, self.config.ppo
        columns = [batch[f"score_{i}"] for i in range(len(ensemble.members))]
        scores = np.stack([column.double().cpu().numpy() for column in columns])  # [k, B]
        check_scores(scores, ensemble.members, batch.ids)
        shaped = (combine(scores, ensemble) - ppo.reward_output_bias) * ppo.reward_output_scaling
        rewards = torch.from_numpy(shaped).float().to(columns[0].device)
        spread, lowest = variance(scores, ensemble.uwo_unbiased), scores.argmin(axis=0)
        stats: Stats = {"reward": mean_of(rewards), "variance": (float(spread.sum()), float(len(batch)))}
        stats |= {f"lowest_{i}": (float((lowest == i).sum()), float(len(batch))) for i in range(len(scores))}
        return attach_rewards_and_filter(batch, rewards, ppo), stats
