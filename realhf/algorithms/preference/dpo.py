"""Learning from preferences without a reward model: DPO and its kin. The formulas are in preference_loss."""

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
KEPT = (REF, "label")


class DPO:
    """Trains the policy, and as ``inference`` sums the reference's log-probabilities of every answer.

    Columns: ``tokens prompt_mask`` per token; the scalars ``ref_logprob_sums`` (float32, nats) unless the loss needs no
    reference, and with unpaired data ``label``. KTO also reads the keys of ``MISMATCHED`` and ``kl_ref_logprob_sums``:
    its point of reference is found from prompts with answers that belong to others. Statistics are those of
    ``pair_stats``, or of ``kto_loss`` where there are no pairs.
    """

    config_type = DPOConfig

    def __init__(self, config: DPOConfig, context: InterfaceContext) -> None:
        self.config = config

    def inference(self, engine: Engine, batch: SequenceBatch, state: State) -> tuple[SequenceBatch, Stats]:
        return SequenceBatch(batch.ids).with_scalars(REF, logprob_sums(engine, with_answers(batch))), {}

    def train_step(self, engine: Engine, batch: SequenceBatch, state: State) -> tuple[Stats, State]:
        ready = with_answers(batch)
        judges_single = self.config.loss is PreferenceLoss.kto
        kl = self.kl_reference(engine, batch) if judges_single else 0.0

        def loss(outputs: Outputs, part: SequenceBatch) -> Loss:
            return self.loss(sums_of(outputs, part), part, kl)

        count = float(len(batch)) if judges_single else len(batch) / 2
        return engine.train(ready, loss, count, together=not self.config.unpaired), state

    def kl_reference(self, engine: Engine, batch: SequenceBatch) -> float:
        """Return KTO's point of reference from the mismatched answers of all ranks. Collective."""
        names = {**KTO_KL_KEYS, f"kl_{REF}": REF}
        others = SequenceBatch(batch.ids, {theirs: batch.columns[ours] for ours, theirs in names.items()})
        total = (logprob_sums(engine, with_answers(others)) - others[REF]).double().sum()
        return kl_reference(engine.reduce(torch.stack([total, torch.full_like(total, len(batch))])))

    def loss(self, sums: Tensor, batch: SequenceBatch, kl: float) -> Loss:
        """Return the loss of a batch whose answers have the log-probabilities ``sums``, ``[B]``."""
        ref = batch[REF] if self.config.loss.needs_ref else None
        if self.config.unpaired:
            assert ref is not None, "unpaired data are for kto"
            return kto_loss(sums, ref, batch["label"] > 0.5, kl, self.config)
        pairs = pairs_of(batch.ids)
        sides = torch.tensor([pairs.better, pairs.worse], dtype=torch.int64, device=sums.device).T
        paired = (sums[sides], None if ref is None else ref[sides], batch["n_tokens"][sides])
        if self.config.loss is not PreferenceLoss.kto:
            return pair_loss(*paired, self.config)
        assert ref is not None, "kto compares with a reference"
        is_good = torch.tensor([row.sample % 2 == 0 for row in batch.ids], dtype=torch.bool, device=sums.device)
        loss = kto_loss(sums, ref, is_good, kl, self.config)
        return Loss(loss.total, {**loss.stats, **pair_stats(*paired, self.config)})


class DPOEvaluation(DPO):
    """Tries the policy on held-out rows: the columns and statistics of training, no step."""

    def inference(self, engine: Engine, batch: SequenceBatch, state: State) -> tuple[SequenceBatch, Stats]:
        ready = with_answers(batch)
        sums = logprob_sums(engine, ready)
        kl = self.kl_reference(engine, batch) if self.config.loss is PreferenceLoss.kto else 0.0
        return SequenceBatch(batch.ids), stats_of(self.loss(sums, ready, kl))


def with_answers(batch: SequenceBatch) -> SequenceBatch:
    """Return what a loss reads: ``response_mask`` per token, ``n_tokens`` per row, and the scalars that there are."""
    lengths = batch.lengths("tokens")
    mask = response_mask(batch["prompt_mask"], lengths)
    ready = batch.only(("tokens", *(key for key in KEPT if key in batch.columns))).with_tokenwise("response_mask", mask)
    return ready.with_scalars("n_tokens", sequence_sums(mask.float(), mask, lengths))


def sums_of(outputs: Outputs, batch: SequenceBatch) -> Tensor:
    """Return the log-probability of every answer, ``[B]`` float32, in nats."""
    return sequence_sums(outputs.logprobs(), batch["response_mask"], batch.lengths("tokens"))


def logprob_sums(engine: Engine, batch: SequenceBatch) -> Tensor:
    return engine.forward(batch.only(("tokens", "response_mask")), sums_of)
