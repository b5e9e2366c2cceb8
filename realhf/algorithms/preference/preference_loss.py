"""Losses of preference learning without a reward model, as pure functions of sequence log-probabilities.

``policy`` and ``ref`` are log-probabilities of responses in nats: ``[P, 2]`` for P pairs (chosen, rejected), or ``[B]``
for single responses. The implicit reward is ``beta (policy - ref)``.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from realhf.algorithms.stats import Monitors
from realhf.api.config.preference import DPOConfig, PreferenceLoss
from realhf.data.protocols import Loss

MAX_LOGPROB = -1e-6  # upper bound of the mean log-probability in the odds


def sequence_sums(x: Tensor, mask: Tensor, lengths: Sequence[int]) -> Tensor:
    """Return the sum of every row's elements where ``mask`` is not 0, ``[B]``; ``x`` and ``mask`` are ``[T]``."""
    kept = x.masked_fill(mask == 0, 0.0)
    return torch.stack([row.sum() for row in kept.split(tuple(lengths))]) if lengths else kept[:0]


def implicit_rewards(policy: Tensor, ref: Tensor | None, n_tokens: Tensor, config: DPOConfig) -> Tensor:
    """Return ``beta (policy - ref)``, or without a reference (orpo, simpo) ``beta policy / n_tokens``."""
    if not config.loss.needs_ref:
        return config.beta * policy / n_tokens.clamp(min=1)
    assert ref is not None, "this loss needs a reference"
    return config.beta * (policy - ref)


def log_odds(mean: Tensor) -> Tensor:
    """Return ``log(p / (1 - p))`` of ``p = exp(mean)``, with ``mean`` clamped to at most -1e-6."""
    mean = mean.clamp(max=MAX_LOGPROB)
    return mean - torch.log(-torch.expm1(mean))


def pair_losses(policy: Tensor, ref: Tensor | None, n_tokens: Tensor, config: DPOConfig) -> Tensor:
    """Return the loss of every pair, ``[P]``; all tensors are ``[P, 2]``.

    With m the margin of implicit rewards, e label_smoothing and l the logistic log-sigmoid:

    * sigmoid: ``-(1-e) l(m) - e l(-m)`` (Rafailov et al. 2023, arXiv 2305.18290, eq. 7; e: Mitchell 2023);
    * positive: the same with ``m - beta lambda max(0, ref - policy)`` of the chosen response (Pal et al. 2024, arXiv
      2402.13228, eq. 3);
    * ipo: ``(m / beta - 1 / (2 beta))^2`` (Azar et al. 2023, arXiv 2310.12036, eq. 17);
    * orpo: mean negative log-probability of the chosen response ``- beta l(difference of log-odds)`` (Hong et al. 2024,
      arXiv 2403.07691, eq. 6);
    * simpo: ``-l(m - gamma)`` (Meng et al. 2024, arXiv 2405.14734, eq. 6).

    ValueError for kto, which has losses of single responses.
    """
    rewards = implicit_rewards(policy, ref, n_tokens, config)
    margin, beta, smoothing = rewards[:, 0] - rewards[:, 1], config.beta, config.label_smoothing
    match config.loss:
        case PreferenceLoss.sigmoid | PreferenceLoss.positive:
            if config.loss is PreferenceLoss.positive:
                assert ref is not None, "this loss needs a reference"
                margin = margin - beta * config.positive_lambda * (ref - policy)[:, 0].clamp(min=0.0)
            return -(1.0 - smoothing) * functional.logsigmoid(margin) - smoothing * functional.logsigmoid(-margin)
        case PreferenceLoss.ipo:
            return (margin / beta - 0.5 / beta).square()
        case PreferenceLoss.orpo:
            means = policy / n_tokens.clamp(min=1)
            odds = log_odds(means)
            return -means[:, 0] - beta * functional.logsigmoid(odds[:, 0] - odds[:, 1])
        case PreferenceLoss.simpo:
            return -functional.logsigmoid(margin - config.simpo_gamma)
        case PreferenceLoss.kto:
            raise ValueError("kto has losses of single responses, not of pairs")


def pair_loss(policy: Tensor, ref: Tensor | None, n_tokens: Tensor, config: DPOConfig) -> Loss:
    """Return the sum of ``pair_losses`` with ``pair_stats``."""
    total, stats = pair_losses(policy, ref, n_tokens, config).sum(), pair_stats(policy, ref, n_tokens, config)
    return Loss(total, {"loss": (total.detach(), float(len(policy))), **stats})


def pair_stats(policy: Tensor, ref: Tensor | None, n_tokens: Tensor, config: DPOConfig) -> Monitors:
    """Return ``accuracy`` (equal rewards are wrong), ``margin``, ``chosen_reward``, ``rejected_reward`` per pair, and
    with a reference ``kl``, the mean of ``policy - ref`` over all responses in nats.

    ``kl`` estimates KL(policy || ref) only for responses sampled from the policy.
    """
    rewards = implicit_rewards(policy.detach(), ref, n_tokens, config)
    margin, count = rewards[:, 0] - rewards[:, 1], float(len(rewards))
    stats: Monitors = {
        "accuracy": ((margin > 0).sum(), count),
        "margin": (margin.sum(), count),
        "chosen_reward": (rewards[:, 0].sum(), count),
        "rejected_reward": (rewards[:, 1].sum(), count),
    }
    return stats if ref is None else {**stats, "kl": ((policy.detach() - ref).sum(), 2 * count)}


def kto_losses(policy: Tensor, ref: Tensor, is_good: Tensor, kl: float, config: DPOConfig) -> Tensor:
    """Return the loss of each response, ``[B]``: ``w_d sigmoid(z - r)`` if desirable, else ``w_u sigmoid(r - z)``.

    r is the implicit reward and ``z = beta kl`` the reference point, without gradient (Ethayarajh et al. 2024, arXiv
    2402.01306, eq. 8). ``is_good`` is ``[B]`` bool.
    """
    gain = config.beta * (policy - ref - kl)
    return torch.where(is_good, config.desirable_weight * (-gain).sigmoid(), config.undesirable_weight * gain.sigmoid())


def kto_loss(policy: Tensor, ref: Tensor, is_good: Tensor, kl: float, config: DPOConfig) -> Loss:
    """Return the sum of ``kto_losses`` with statistics: ``accuracy``, the fraction of responses whose reward is on the
    right side of the reference point; ``chosen_reward``, ``rejected_reward``; ``kl`` as in ``pair_stats``."""
    total = kto_losses(policy, ref, is_good, kl, config).sum()
    log_ratios = policy.detach() - ref
    rewards, count = config.beta * log_ratios, float(len(log_ratios))
    right = torch.where(is_good, log_ratios > kl, log_ratios < kl)
    stats: Monitors = {
        "loss": (total.detach(), count),
        "accuracy": (right.sum(), count),
        "chosen_reward": (rewards[is_good].sum(), is_good.sum()),
        "rejected_reward": (rewards[~is_good].sum(), (~is_good).sum()),
        "kl": (log_ratios.sum(), count),
        "kl_reference": (kl * count, count),
    }
    return Loss(total, stats)


def kl_reference(sums: Tensor) -> float:
    """Return KTO's reference point in nats from the (sum, count) of ``policy - ref`` over the global batch, ``[2]``.

    It is the mean log-ratio of mismatched responses, at least 0: a biased estimate of KL(policy || ref) that needs no
    sampling (Ethayarajh et al. 2024, arXiv 2402.01306, sec. 4).
    """
    total, count = sums.tolist()
    return max(0.0, total / max(count, 1.0))
