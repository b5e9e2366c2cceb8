"""Supervised fine-tuning on answers."""

from dataclasses import dataclass

import torch
from torch import Tensor

from realhf.algorithms.ppo_math import answer_mask
from realhf.api.config import opt
from realhf.api.engine import Engine, InterfaceContext, Loss, Outputs
from realhf.api.messages import State, Stats
from realhf.data.batch import SequenceBatch


@dataclass
class SFTConfig:
    seq_mean: bool = opt(False, "average over the tokens of an answer first, then over answers")


def token_weights(mask: Tensor, lengths: tuple[int, ...], seq_mean: bool) -> Tensor:
    """Return what each token counts in the loss, ``[T]`` float32: 1, or 1 over its row's number of answer tokens."""
    if not seq_mean or not lengths:
        return mask.float()
    per_row = torch.stack([row.sum() for row in mask.split(lengths)]).clamp(min=1)
    return mask / per_row.repeat_interleave(torch.tensor(lengths, device=mask.device)).float()


def sft_loss(outputs: Outputs, batch: SequenceBatch) -> Loss:
    """Return the weighted negative log-likelihood; columns ``weights`` (float32) and ``answer_mask`` (uint8)."""
    mask, weights = batch["answer_mask"].bool(), batch["weights"]
    nll = (-outputs.logprobs()).masked_fill(~mask, 0.0)
    total = (nll * weights).sum()
    return Loss(total, {"loss": (total.detach(), weights.sum()), "nll": (nll.detach().sum(), mask.sum())})


class SFT:
    """Token-mean negative log-likelihood of the answers over the global batch.

    Columns: ``tokens``, ``prompt_mask``. Statistics: ``loss``; ``nll`` per token (perplexity is exp of its mean);
    ``n_tokens``, answer tokens per row. A row without an answer counts for nothing.
    """

    config_type = SFTConfig

    def __init__(self, config: SFTConfig, context: InterfaceContext) -> None:
        self.config = config

    def train_step(self, engine: Engine, batch: SequenceBatch, state: State) -> tuple[Stats, State]:
        mask = answer_mask(batch["prompt_mask"], batch.lengths("tokens"))
        weights = token_weights(mask, batch.lengths("tokens"), self.config.seq_mean)
        ready = batch.only(("tokens",)).with_tokenwise("answer_mask", mask.byte()).with_tokenwise("weights", weights)
        if self.config.seq_mean:
            count = float(sum(bool(row.any()) for row in ready.columns["answer_mask"].rows()))
        else:
            count = float(mask.sum())
        stats = engine.train(ready, sft_loss, count)
        return {**stats, "n_tokens": (float(mask.sum()), float(len(batch)))}, state
