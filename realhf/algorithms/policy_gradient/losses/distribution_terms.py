"""Terms of the actor's loss that read more of its distribution than the sampled tokens: entropy and distillation."""

from torch import Tensor

from realhf.algorithms.distillation.options import Distillation
from realhf.algorithms.distillation.teacher import TEACHER, TEACHER_TOP, forward_kl, split_top
from realhf.algorithms.policy_gradient.config import PPOConfig
from realhf.algorithms.policy_gradient.losses.kl import kl_terms
from realhf.algorithms.stats import Monitors
from realhf.api.config import KLEstimator
from realhf.data.batch import SequenceBatch
from realhf.data.protocols import Loss, Outputs


def loss_keys(config: PPOConfig, batch: SequenceBatch) -> list[str]:
    """Return the columns of the teacher that the loss reads."""
    used = {Distillation.reverse_kl_loss: TEACHER, Distillation.forward_kl: TEACHER_TOP}
    return [key for objective, key in used.items() if objective is config.distill.objective and key in batch.columns]


def with_distribution_terms(
    loss: Loss, logprobs: Tensor, outputs: Outputs, batch: SequenceBatch, config: PPOConfig, temperature: float
) -> Loss:
    """Add ``-entropy_coef * entropy`` and the distillation loss of every trained token, weighted as the policy loss.

    Columns (``[T]``): ``loss_mask weights``; for distillation ``logprobs`` and a column of the teacher. Statistics:
    ``entropy`` in nats per token, ``distill_loss``.
    """
    mask, terms, stats = batch["loss_mask"].bool(), list[Tensor](), dict[str, Tensor]()
    has_top = TEACHER_TOP in batch.columns
    if TEACHER in batch.columns:
        stats["distill_loss"] = kl_terms(KLEstimator.k2, logprobs, batch[TEACHER], batch["logprobs"])
    if has_top or config.entropy_coef:
        ids, teacher = split_top(batch) if has_top else (batch["tokens"].new_empty(len(mask), 0), logprobs)
        student, stats["entropy"] = outputs.distribution(ids, temperature, mask)
        if has_top:
            stats["distill_loss"] = forward_kl(student, teacher)
        terms.append(-config.entropy_coef * stats["entropy"])
    if "distill_loss" in stats:
        terms.append(config.distill.coef * stats["distill_loss"])
    if not terms:
        return loss
    total = sum(((term * batch["weights"]).masked_fill(~mask, 0.0).sum() for term in terms), loss.total)
    monitors: Monitors = {key: (x.detach().masked_fill(~mask, 0.0).sum(), mask.sum()) for key, x in stats.items()}
    return Loss(total, {**loss.stats, **monitors})
