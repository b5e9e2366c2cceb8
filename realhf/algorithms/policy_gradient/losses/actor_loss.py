"""The loss of the actor: a policy loss of ``POLICY_LOSSES``, aggregated over tokens, and the KL penalty.

Columns are packed, ``[T]``. The engine divides the weighted sum over tokens by the global sum of ``denominator``.
"""

import torch
from torch import Tensor

from realhf.algorithms.policy_gradient.config import PPOConfig
from realhf.algorithms.policy_gradient.losses.corrections import Mismatch
from realhf.algorithms.policy_gradient.losses.kl import LOG_RATIO_LIMIT, kl_terms
from realhf.algorithms.policy_gradient.losses.policy_losses import POLICY_LOSSES, PolicyLossInputs
from realhf.api.config import KLPlace, LossAggregation
from realhf.data.batch import SequenceBatch
from realhf.data.protocols import Loss
from realhf.ops.rows import PackedRows, per_token


def token_weights(rows: PackedRows, aggregation: LossAggregation, length: float) -> Tensor:
    """Return the weight of each token in the sum that is divided by ``denominator``, ``[T]`` float32, 0 where masked.

    ``token_mean``: mean over all tokens (DAPO). ``seq_mean``: mean over responses of the mean over their tokens (GRPO,
    arXiv 2402.03300). ``seq_sum``: mean over responses of the sum over their tokens. ``constant``: as seq_sum, divided
    by ``length``, which removes the length bias (Dr. GRPO, arXiv 2503.20783).
    """
    ones = rows.mask.float()
    match aggregation:
        case LossAggregation.token_mean | LossAggregation.seq_sum:
            return ones
        case LossAggregation.seq_mean:
            return ones / per_token(rows.counts.clamp(min=1.0), rows.lengths)
        case LossAggregation.constant:
            return ones / length


def denominator(rows: PackedRows, aggregation: LossAggregation) -> float:
    """Return this worker's share of the divisor: trained tokens, or responses with a trained token."""
    counts = rows.counts
    return float(counts.sum() if aggregation is LossAggregation.token_mean else (counts > 0).sum())


def actor_loss(logprobs: Tensor, batch: SequenceBatch, config: PPOConfig, kl_coef: float = 0.0) -> Loss:
    """Return the weighted sum over trained tokens of the policy loss and, with ``kl_in=loss``, of the KL penalty.

    Columns (``[T]``): ``logprobs`` (old), ``advantages``, ``loss_mask``, ``weights``; ``ref_logprobs`` and
    ``kl_weights`` for the penalty; ``is_weights`` with recomputed old log-probs (``CORRECTIONS``); ``is_selected`` for
    clip_cov and kl_cov.
    Statistics: ``actor_loss``, ``importance_ratio``, ``clip_fraction`` (fraction of tokens without gradient),
    ``approx_kl`` (``r - 1 - log r``, an estimate of KL(old || new) in nats per token) and ``logprob_diff`` (mean
    |log r|: before the first step of a batch, the difference between trainer and generator).
    """
    mask, old = batch["loss_mask"].bool(), batch["logprobs"]
    rows = PackedRows(mask, batch.lengths("tokens"))
    log_ratio = (logprobs - old).masked_fill(~mask, 0.0).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    name, low = config.policy_loss.value, config.eps_clip
    high = low if config.eps_clip_high is None else config.eps_clip_high
    selected = batch["is_selected"].bool() if "is_selected" in batch.columns else None
    inputs = PolicyLossInputs(logprobs, log_ratio, batch["advantages"], rows, low, high, selected)
    terms = POLICY_LOSSES[name].fn(inputs, vars(config.losses).get(name))
    loss = terms.loss * batch["is_weights"] if "is_weights" in batch.columns else terms.loss
    total = (loss * batch["weights"]).masked_fill(~mask, 0.0).sum()
    log_r, count = log_ratio.detach(), mask.sum()
    stats = {
        "actor_loss": (loss.detach().masked_fill(~mask, 0.0).sum(), count),
        "importance_ratio": ((log_r.exp() * mask).sum(), count),
        "clip_fraction": (0.0 if terms.is_clipped is None else (terms.is_clipped & mask).sum(), count),
        "approx_kl": ((torch.expm1(log_r) - log_r).sum(), count),
        "logprob_diff": (log_r.abs().sum(), count),
    }
    if config.kl_in is KLPlace.loss:
        kl = kl_terms(config.kl_loss_estimator, logprobs, batch["ref_logprobs"], old)
        if config.kl_loss_clip is not None:
            kl = kl.clamp(0.0, config.kl_loss_clip)
        total = total + kl_coef * (kl * batch["kl_weights"]).masked_fill(~mask, 0.0).sum()
        stats["kl_loss"] = (kl.detach().masked_fill(~mask, 0.0).sum(), count)
    return Loss(total, stats)


def mismatch_of(logprobs: Tensor, behaviour_logprobs: Tensor, rows: PackedRows, cap: float) -> Mismatch:
    """Return the ratios of trainer and generator on the sampled tokens ``rows``, without gradient (columns ``[T]``)."""
    log_ratio = (logprobs - behaviour_logprobs).masked_fill(~rows.mask, 0.0).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return Mismatch(log_ratio.detach(), rows, cap)
