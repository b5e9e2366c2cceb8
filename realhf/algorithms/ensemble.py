"""Rewards from several reward models: reads what each member gave an answer, and makes one score of them."""

from dataclasses import dataclass

import numpy as np
import torch

from realhf.algorithms.selection import scored
from realhf.algorithms.stats import mean_of
from realhf.api.config import PPOConfig, opt
from realhf.api.engine import Engine, InterfaceContext
from realhf.api.ensemble import EnsembleConfig
from realhf.api.messages import State, Stats
from realhf.data.batch import SequenceBatch
from realhf.rewards.ensemble import combine, read_scale, rescaled, variance


@dataclass
class EnsembleRewardConfig:
    ensemble: EnsembleConfig = opt(EnsembleConfig, "the members and what is made of their scores")
    ppo: PPOConfig = opt(PPOConfig, "scaling and bias of rewards, which answers stay")


def score_key(member: int) -> str:
    """Return the column with a member's scores."""
    return f"score_{member}"


class EnsembleReward:
    """Combines the scalars ``score_0``, ``score_1``, ... and makes the scalar ``rewards``, scaled as ``PairedReward``'s.

    Reads ``prompt_mask`` as well, for answers are selected here. Statistics count all answers: ``reward``,
    ``variance`` between members, and of every member i ``lowest_i``, the share of answers that it scores lowest (ties
    count for the first). A member's score that is not finite is a ValueError.
    """

    config_type = EnsembleRewardConfig

    def __init__(self, config: EnsembleRewardConfig, context: InterfaceContext) -> None:
        self.config = config
        members = config.ensemble.members
        self.scales = [read_scale(member) for member in members] if config.ensemble.normalise else []

    def inference(self, engine: Engine | None, batch: SequenceBatch, state: State) -> tuple[SequenceBatch, Stats]:
        ensemble, ppo = self.config.ensemble, self.config.ppo
        columns = [batch[score_key(i)] for i in range(len(ensemble.members))]
        given = np.stack([column.double().cpu().numpy() for column in columns])  # [k, B]
        scores = rescaled(given, self.scales) if self.scales else given
        try:
            combined = combine(scores, ensemble)
        except ValueError as error:
            member, row = np.argwhere(~np.isfinite(scores))[0]
            raise ValueError(f"{error} ({ensemble.members[member]}, {batch.ids[row]})") from None
        shaped = (combined - ppo.reward_output_bias) * ppo.reward_output_scaling
        rewards = torch.from_numpy(shaped).float().to(columns[0].device)
        lowest = np.bincount(scores.argmin(axis=0), minlength=len(scores))
        stats: Stats = {
            "reward": mean_of(rewards),
            "variance": (float(variance(scores, ensemble.uwo_unbiased).sum()), float(len(batch))),
            **{f"lowest_{i}": (float(n), float(len(batch))) for i, n in enumerate(lowest)},
        }
        return scored(batch, rewards, ppo), stats
