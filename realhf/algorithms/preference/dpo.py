"""The interfaces of preference learning without a reward model: DPO and related algorithms."""

import torch
from torch import Tensor

from realhf.algorithms.policy_gradient.ppo_formulas import response_mask
from realhf.algorithms.preference.pairs import pairs_of
from realhf.algorithms.preference.preference_loss import kl_reference, kto_loss, pair_loss, pair_stats, sequence_sums
from realhf.algorithms.stats import stats_of
from realhf.api.config.preference import KTO_KL_KEYS, DPOConfig, PreferenceLoss
from realhf.api.messages import State, Stats
from realhf.data.batch import SequenceBatch
from realhf.data.protocols import Engine, InterfaceContext, Loss, Outputs

REF = "ref_logprob_sums"
SCALARS = (REF, "label")


class DPO:
    """Trains the policy; ``inference`` computes the log-probability of each response under the reference.

    Columns: ``tokens prompt_mask`` per token; the scalars ``ref_logprob_sums`` (float32, nats) unless the loss needs no
    reference, and ``label`` with unpaired data. KTO also reads ``KTO_KL_KEYS`` and ``kl_ref_logprob_sums``, prompts
    with mismatched responses from which it estimates its reference point. Statistics: ``pair_stats``, or ``kto_loss``
    for unpaired data.
    """

    config_type = DPOConfig

    def __init__(self, config: DPOConfig, context: InterfaceContext) -> None:
        self.config = config

    def inference(self, engine: Engine, batch: SequenceBatch, state: State) -> tuple[SequenceBatch, Stats]:
        return SequenceBatch(batch.ids).with_scalars(REF, logprob_sums(engine, loss_columns(batch))), {}

    def train_step(self, engine: Engine, batch: SequenceBatch, state: State) -> tuple[Stats, State]:
        ready = loss_columns(batch)
        is_kto = self.config.loss is PreferenceLoss.kto
        kl = self.kl_reference(engine, batch) if is_kto else 0.0
        loss = lambda outputs, part: self.loss(sums_of(outputs, part), part, kl)
        count = float(len(batch)) if is_kto else len(batch) / 2
        return engine.train(ready, loss, count, together=not self.config.unpaired), state

    def kl_reference(self, engine: Engine, batch: SequenceBatch) -> float:
        """Return the reference point of KTO from the mismatched responses of all ranks. Collective."""
        names = {**KTO_KL_KEYS, f"kl_{REF}": REF}
        mismatched = SequenceBatch(batch.ids, {name: batch.columns[key] for key, name in names.items()})
        total = (logprob_sums(engine, loss_columns(mismatched)) - mismatched[REF]).double().sum()
        return kl_reference(engine.reduce(torch.stack([total, torch.full_like(total, len(batch))])))

    def loss(self, sums: Tensor, batch: SequenceBatch, kl: float) -> Loss:
        """Return the loss of a batch whose responses have the log-probabilities ``sums``, ``[B]``."""
        ref = batch[REF] if self.config.loss.needs_ref else None
        if self.config.unpaired:
            assert ref is not None, "only kto supports unpaired data"
            return kto_loss(sums, ref, batch["label"] > 0.5, kl, self.config)
        pairs = pairs_of(batch.ids)
        sides = torch.tensor([pairs.better, pairs.worse], dtype=torch.int64, device=sums.device).T
        paired = (sums[sides], None if ref is None else ref[sides], batch["n_tokens"][sides])
        if self.config.loss is not PreferenceLoss.kto:
            return pair_loss(*paired, self.config)
        is_good = torch.tensor([row.sample % 2 == 0 for row in batch.ids], dtype=torch.bool, device=sums.device)
        loss = kto_loss(sums, batch[REF], is_good, kl, self.config)
        return Loss(loss.total, {**loss.stats, **pair_stats(*paired, self.config)})


class DPOEvaluation(DPO):
    """Evaluates the policy on held-out rows, with the columns and statistics of training."""

    def inference(self, engine: Engine, batch: SequenceBatch, state: State) -> tuple[SequenceBatch, Stats]:
        ready = loss_columns(batch)
        kl = self.kl_reference(engine, batch) if self.config.loss is PreferenceLoss.kto else 0.0
        return SequenceBatch(batch.ids), stats_of(self.loss(logprob_sums(engine, ready), ready, kl))


def loss_columns(batch: SequenceBatch) -> SequenceBatch:
    """Return the columns of the loss: ``response_mask`` per token, ``n_tokens`` per row, and scalars of the batch."""
    lengths = batch.lengths("tokens")
    mask = response_mask(batch["prompt_mask"], lengths)
    scalars = [key for key in SCALARS if key in batch.columns]
    ready = batch.only(("tokens", *scalars)).with_tokenwise("response_mask", mask)
    return ready.with_scalars("n_tokens", sequence_sums(mask.float(), mask, lengths))


def sums_of(outputs: Outputs, batch: SequenceBatch) -> Tensor:
    """Return the log-probability of every response, ``[B]`` float32, in nats."""
    return sequence_sums(outputs.logprobs(mask=batch["response_mask"]), batch["response_mask"], batch.lengths("tokens"))


def logprob_sums(engine: Engine, batch: SequenceBatch) -> Tensor:
    return engine.forward(batch.only(("tokens", "response_mask")), sums_of)
