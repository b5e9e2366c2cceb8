"""Losses of the policy: what a token costs, given how much more likely it has become and its advantage.

Every argument is a packed column ``[T]``; ``log_ratio`` is log p - log p_old. A token's weight in the sum is another
matter: ``token_weights``.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from realhf.algorithms.policy_gradient.kl import LOG_RATIO_LIMIT, kl_terms
from realhf.api.config import KLPlace, LossAggregation, PolicyLoss, PPOConfig
from realhf.data.batch import SequenceBatch
from realhf.data.protocols import Limits, Loss
from realhf.ops.rows import PackedRows, per_token


@dataclass(frozen=True)
class TokenLoss:
    """The loss of every token, and where it is flat: no gradient flows because the ratio was clipped (bool)."""

    loss: Tensor
    is_clipped: Tensor


def clipped(log_ratio: Tensor, advantages: Tensor, low: float, high: float) -> TokenLoss:
    """Return ``max(-A r, -A clip(r, 1 - low, 1 + high))`` with ``r = exp(log_ratio)``.

    PPO (Schulman et al. 2017, arXiv 1707.06347, eq. 7); ``high > low`` is the clip-higher of DAPO (arXiv 2503.14476).
    """
    ratio = log_ratio.exp()
    plain, held = -advantages * ratio, -advantages * ratio.clamp(1.0 - low, 1.0 + high)
    return TokenLoss(torch.maximum(plain, held), held > plain)


def sequence_clipped(log_ratio: Tensor, advantages: Tensor, rows: PackedRows, low: float, high: float) -> TokenLoss:
    """Return the clipped loss with one ratio per answer, the geometric mean of its tokens'.

    GSPO (Zheng et al. 2025, arXiv 2507.18071, eq. 5-7).
    """
    return clipped(rows.mean(log_ratio), advantages, low, high)


def clipped_weights(logprobs: Tensor, log_ratio: Tensor, advantages: Tensor, low: float, high: float) -> TokenLoss:
    """Return ``-sg(clip(r, 1 - low, 1 + high)) A log p``: clipped tokens keep their gradient.

    CISPO (MiniMax-M1, arXiv 2506.13585, eq. 4-5).
    """
    ratio = log_ratio.detach().exp()
    held = ratio.clamp(1.0 - low, 1.0 + high)
    return TokenLoss(-held * advantages * logprobs, torch.zeros_like(ratio, dtype=torch.bool))


def reinforce(logprobs: Tensor, advantages: Tensor) -> TokenLoss:
    """Return ``-A log p``: the policy gradient on fresh answers, with neither ratio nor clip (ReMax, RLOO)."""
    return TokenLoss(-advantages * logprobs, torch.zeros_like(logprobs, dtype=torch.bool))


def token_weights(rows: PackedRows, mean: LossAggregation, constant: float) -> Tensor:
    """Return what each token counts in the sum that is divided by ``denominator``, ``[T]`` float32, 0 where masked.

    ``token_mean``: every token of the batch alike (DAPO). ``seq_mean``: every answer alike, its tokens share its weight
    (GRPO, arXiv 2402.03300). ``seq_sum``: tokens add up, answers are averaged. ``constant``: sums over a constant
    length, so that long answers are not favoured (Dr. GRPO, arXiv 2503.20783).
    """
    ones = rows.mask.float()
    match mean:
        case LossAggregation.token_mean | LossAggregation.seq_sum:
            return ones
        case LossAggregation.seq_mean:
            return ones / per_token(rows.counts.clamp(min=1.0), rows.lengths)
        case LossAggregation.constant:
            return ones / constant


def denominator(rows: PackedRows, mean: LossAggregation) -> float:
    """Return this worker's share of what the weighted sum is divided by: trained tokens, or answers that have any."""
    counts = rows.counts
    return float(counts.sum() if mean is LossAggregation.token_mean else (counts > 0).sum())


def actor_loss(logprobs: Tensor, batch: SequenceBatch, config: PPOConfig, kl_coef: float = 0.0) -> Loss:
    """Return the weighted sum over trained tokens of the policy's loss and, with ``kl_in=loss``, of the KL penalty.

    Columns (``[T]``): ``logprobs`` (old), ``advantages``, ``loss_mask``, ``weights``; ``ref_logprobs`` and
    ``kl_weights`` for the penalty; ``is_weights`` where old log-probabilities are not those of the generator
    (truncated importance sampling). Monitors: ``actor_loss``, ``importance_ratio``, ``clip_fraction`` (share of tokens
    without gradient), ``approx_kl`` (``r - 1 - log r``, an estimate of KL(old || new) in nats per token) and
    ``logprob_diff`` (the mean of |log r|: before the first step of a batch, how far trainer and generator are apart).
    """
    mask, old = batch["loss_mask"].bool(), batch["logprobs"]
    rows = PackedRows(mask, batch.lengths("tokens"))
    log_ratio = (logprobs - old).masked_fill(~mask, 0.0).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    terms = _terms(logprobs, log_ratio, batch["advantages"], rows, config)
    loss = terms.loss * batch["is_weights"] if "is_weights" in batch.columns else terms.loss
    total = (loss * batch["weights"]).masked_fill(~mask, 0.0).sum()
    seen, count = log_ratio.detach(), mask.sum()
    stats = {
        "actor_loss": (loss.detach().masked_fill(~mask, 0.0).sum(), count),
        "importance_ratio": ((seen.exp() * mask).sum(), count),
        "clip_fraction": ((terms.is_clipped & mask).sum(), count),
        "approx_kl": ((torch.expm1(seen) - seen).sum(), count),
        "logprob_diff": (seen.abs().sum(), count),
    }
    if config.kl_in is KLPlace.loss:
        kl = kl_terms(config.kl_loss_estimator, logprobs, batch["ref_logprobs"], old)
        if config.kl_loss_clip is not None:
            kl = kl.clamp(0.0, config.kl_loss_clip)
        total = total + kl_coef * (kl * batch["kl_weights"]).masked_fill(~mask, 0.0).sum()
        stats["kl_loss"] = (kl.detach().masked_fill(~mask, 0.0).sum(), count)
    return Loss(total, stats)


def _terms(logprobs: Tensor, log_ratio: Tensor, advantages: Tensor, rows: PackedRows, config: PPOConfig) -> TokenLoss:
    low = config.eps_clip
    high = low if config.eps_clip_high is None else config.eps_clip_high
    match config.policy_loss:
        case PolicyLoss.clip:
            return clipped(log_ratio, advantages, low, high)
        case PolicyLoss.sequence_clip:
            return sequence_clipped(log_ratio, advantages, rows, low, high)
        case PolicyLoss.cispo:
            return clipped_weights(logprobs, log_ratio, advantages, low, high)
        case PolicyLoss.reinforce:
            return reinforce(logprobs, advantages)


def truncated_is_weights(logprobs: Tensor, behaviour_logprobs: Tensor, mask: Tensor, cap: float) -> Tensor:
    """Return ``min(p / p_behaviour, cap)`` per token, 1 where masked: what makes up for answers of another policy.

    ``logprobs`` are those of the weights that training starts from, as training computes them; the answers were drawn
    by older weights or another engine (decoupled PPO, arXiv 2505.24298, eq. 5; truncation: Espeholt et al. 2018,
    arXiv 1802.01561). No gradient flows.
    """
    log_ratio = (logprobs - behaviour_logprobs).masked_fill(~mask, 0.0).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return log_ratio.detach().exp().clamp(max=cap)


def early_stop_limits(config: PPOConfig) -> Limits:
    """Return the largest mean importance ratio and approximate KL at which a mini-batch still makes a step."""
    limits = {"importance_ratio": config.early_stop_imp_ratio, "approx_kl": config.early_stop_kl}
    return {name: limit for name, limit in limits.items() if limit is not None}
