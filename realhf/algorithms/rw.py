"""Reward models: pairwise training (Bradley-Terry) and scoring."""

import torch
from torch.nn import functional

from realhf.algorithms.selection import scored
from realhf.algorithms.stats import mean_of
from realhf.api.batch import RowId
from realhf.api.config import PPOConfig
from realhf.api.engine import Engine, InterfaceContext, Loss, Outputs
from realhf.api.messages import State, Stats
from realhf.data.batch import SequenceBatch


def pairs_of(ids: tuple[RowId, ...]) -> tuple[list[int], list[int], list[float]]:
    """Return the chosen rows, the rejected row of each, and each pair's weight 1/g for a prompt of g pairs.

    Sample 2i of a prompt is chosen and sample 2i+1 is the rejected one of the same pair, in any order of rows.
    ValueError where a row has no partner.
    """
    row_of = {row: i for i, row in enumerate(ids)}
    per_prompt: dict[int, int] = {}
    for row in ids:
        per_prompt[row.prompt] = per_prompt.get(row.prompt, 0) + 1
        if row._replace(sample=row.sample ^ 1) not in row_of:
            raise ValueError(
                f"sample {row.sample} of prompt {row.prompt} has no partner: pairs are samples 2i and 2i+1"
            )
    chosen = [row for row in ids if row.sample % 2 == 0]
    rejected = [row_of[row._replace(sample=row.sample + 1)] for row in chosen]
    return [row_of[row] for row in chosen], rejected, [2.0 / per_prompt[row.prompt] for row in chosen]


def paired_loss(outputs: Outputs, batch: SequenceBatch) -> Loss:
    """Return the sum over prompts of the mean over pairs of ``-logsigmoid(s_chosen - s_rejected)``."""
    scores = outputs.last_values()
    chosen, rejected, weights = pairs_of(batch.ids)
    margin = scores[chosen] - scores[rejected]
    total = -(functional.logsigmoid(margin) * torch.tensor(weights, device=margin.device)).sum()
    seen = margin.detach()
    stats = {
        "loss": (total.detach(), float(sum(weights))),
        "accuracy": ((seen > 0).sum(), float(len(chosen))),
        "margin": (seen.sum(), float(len(chosen))),
        "chosen_score": (scores.detach()[chosen].sum(), float(len(chosen))),
        "rejected_score": (scores.detach()[rejected].sum(), float(len(chosen))),
    }
    return Loss(total, stats)


class PairedReward:
    """A scalar head on the last token.

    Training reads ``tokens`` of interleaved pairs; scoring reads ``tokens`` (and ``prompt_mask`` where answers are
    selected) and makes ``rewards = (score - reward_output_bias) * reward_output_scaling``. Equal scores of a pair
    count as wrong.
    """

    config_type = PPOConfig

    def __init__(self, config: PPOConfig, context: InterfaceContext) -> None:
        self.config = config

    def inference(self, engine: Engine, batch: SequenceBatch, state: State) -> tuple[SequenceBatch, Stats]:
        scores = engine.forward(batch.only(("tokens",)), lambda outputs, _: outputs.last_values())
        rewards = (scores.float() - self.config.reward_output_bias) * self.config.reward_output_scaling
        return scored(batch, rewards, self.config), {"reward": mean_of(rewards)}

    def train_step(self, engine: Engine, batch: SequenceBatch, state: State) -> tuple[Stats, State]:
        n_prompts = len({row.prompt for row in batch.ids})
        return engine.train(batch.only(("tokens",)), paired_loss, float(n_prompts), together=True), state
