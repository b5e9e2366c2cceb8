"""Supervised fine-tuning."""

from dataclasses import dataclass

from torch import Tensor

from realhf.algorithms.policy_gradient.losses.actor_loss import token_weights
from realhf.algorithms.policy_gradient.ppo_formulas import response_mask
from realhf.algorithms.stats import stats_of
from realhf.api.config import LossAggregation, opt
from realhf.api.messages import State, Stats
from realhf.data.batch import SequenceBatch
from realhf.data.protocols import Engine, InterfaceContext, Loss, Outputs
from realhf.ops.rows import PackedRows


@dataclass
class SFTConfig:
    seq_mean: bool = opt(False, "average over the tokens of each response, then over responses")


def response_logprobs(outputs: Outputs, batch: SequenceBatch) -> Tensor:
    return outputs.logprobs(mask=batch["response_mask"])


def sft_loss(logprobs: Tensor, batch: SequenceBatch) -> Loss:
    """Return the negative log-likelihood, weighted by column ``weights``."""
    mask, weights = batch["response_mask"].bool(), batch["weights"]
    nll = (-logprobs).masked_fill(~mask, 0.0)
    total = (nll * weights).sum()
    return Loss(total, {"loss": (total.detach(), weights.sum()), "nll": (nll.detach().sum(), mask.sum())})


class SFT:
    """Minimises the mean negative log-likelihood of responses; ``inference`` evaluates on held-out rows.

    Columns: ``tokens``, ``prompt_mask``. Statistics: ``loss``; ``nll`` per token; ``n_tokens``, response tokens per
    row. Rows without a response are ignored.
    """

    config_type = SFTConfig

    def __init__(self, config: SFTConfig, context: InterfaceContext) -> None:
        self.config = config

    def train_step(self, engine: Engine, batch: SequenceBatch, state: State) -> tuple[Stats, State]:
        ready = self.with_weights(batch)
        n_tokens = float(ready["response_mask"].sum())
        rows = PackedRows(ready["response_mask"].bool(), batch.lengths("tokens"))
        count = float((rows.counts > 0).sum()) if self.config.seq_mean else n_tokens
        stats = engine.train(ready, lambda outputs, part: sft_loss(response_logprobs(outputs, part), part), count)
        return {**stats, "n_tokens": (n_tokens, float(len(batch)))}, state

    def inference(self, engine: Engine, batch: SequenceBatch, state: State) -> tuple[SequenceBatch, Stats]:
        ready = self.with_weights(batch)
        logprobs = engine.forward(ready.only(("tokens", "response_mask")), response_logprobs)
        return SequenceBatch(batch.ids), stats_of(sft_loss(logprobs, ready))

    def with_weights(self, batch: SequenceBatch) -> SequenceBatch:
        """Add the response mask, and token weights of 1, or with ``seq_mean`` of 1 / the row's response length."""
        lengths = batch.lengths("tokens")
        mask = response_mask(batch["prompt_mask"], lengths)
        aggregation = LossAggregation.seq_mean if self.config.seq_mean else LossAggregation.seq_sum
        ready = batch.only(("tokens",)).with_tokenwise("response_mask", mask.byte())
        return ready.with_tokenwise("weights", token_weights(PackedRows(mask, lengths), aggregation, 1.0))
