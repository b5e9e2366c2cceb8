"""Rewards from an ensemble of reward models."""

from dataclasses import dataclass

import numpy as np
import torch

from realhf.algorithms.policy_gradient.config import PPOConfig
from realhf.algorithms.policy_gradient.rewards import rewards_of
from realhf.api.config import opt
from realhf.api.config.ensemble import EnsembleConfig
from realhf.api.messages import State, Stats
from realhf.data.batch import SequenceBatch
from realhf.data.protocols import Engine, InterfaceContext
from realhf.ops.ensemble import check_scores, combine, variance


@dataclass
class EnsembleRewardConfig:
    ensemble: EnsembleConfig = opt(EnsembleConfig, "members and objective")
    ppo: PPOConfig = opt(PPOConfig, "scaling and bias of rewards, selection of responses")


class EnsembleReward:
    """Combines the scalars ``score_0``, ``score_1``, ... into ``rewards``, scaled as in PairedReward.

    Reads ``prompt_mask`` for the selection. Statistics over all responses: ``reward``, ``variance`` over members, and
    ``lowest_i``, the fraction of responses that member i scores lowest (the first of equal ones). ValueError for a
    score that is not finite.
    """

    config_type = EnsembleRewardConfig

    def __init__(self, config: EnsembleRewardConfig, context: InterfaceContext) -> None:
        self.config = config

    def inference(self, engine: Engine | None, batch: SequenceBatch, state: State) -> tuple[SequenceBatch, Stats]:
        ensemble = self.config.ensemble
        columns = [batch[f"score_{i}"] for i in range(len(ensemble.members))]
        scores = np.stack([column.double().cpu().numpy() for column in columns])  # [k, B]
        check_scores(scores, ensemble.members, batch.ids)
        total = torch.from_numpy(combine(scores, ensemble)).to(columns[0].device)
        rewarded, stats = rewards_of(batch, total, self.config.ppo)
        spread, lowest, count = variance(scores, ensemble.uwo_unbiased), scores.argmin(axis=0), float(len(batch))
        stats |= {"variance": (float(spread.sum()), count)}
        return rewarded, stats | {f"lowest_{i}": (float((lowest == i).sum()), count) for i in range(len(scores))}
