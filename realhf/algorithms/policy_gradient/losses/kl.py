"""Estimators of the KL divergence from the reference, and the adaptive KL coefficient.

Per token sampled from the policy, with ``d = log p - log ref`` (Schulman 2020, "Approximating KL divergence"):

| | value | as a loss, its expected on-policy gradient is that of |
|---|---|---|
| k1 | ``d`` | a constant: 0 |
| k2 | ``d^2 / 2`` | KL(p || ref) |
| k3 | ``exp(-d) - 1 + d`` | KL(ref || p) |
| k4 | ``r d`` with r = p / p_old, gradients through r | KL(p || ref), off-policy too |

In the reward only k1 gives an unbiased gradient of KL(p || ref).
"""

import torch
from torch import Tensor

from realhf.algorithms.policy_gradient.config import PPOConfig
from realhf.api.config import KLEstimator
from realhf.api.messages import State

LOG_RATIO_LIMIT = 40.0


def kl_terms(estimator: KLEstimator, logprobs: Tensor, ref_logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    """Return the estimate per token in nats, with gradients, in the shape of ``logprobs``.

    ``old_logprobs`` belong to the policy that sampled the tokens. Differences of log-probabilities are clamped to +-40,
    so that tokens of probability 0 under the reference stay finite.
    """
    d = (logprobs - ref_logprobs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    match estimator:
        case KLEstimator.k1:
            return d
        case KLEstimator.k2:
            return d.square() / 2
        case KLEstimator.k3:
            return torch.expm1(-d) + d
        case KLEstimator.k4:
            return (logprobs - old_logprobs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp() * d


def kl_coefficient(state: State, config: PPOConfig) -> float:
    """Return the current KL coefficient: ``kl_ctl``, or the value of the adaptive controller."""
    return float(state.get("kl_coef", config.kl_ctl)) if config.use_adaptive_kl_ctl else config.kl_ctl


def next_kl_coefficient(coef: float, kl_sum: float, n_responses: float, config: PPOConfig) -> float:
    """Return the coefficient after a step; ``kl_sum`` is the KL of ``n_responses`` responses in nats.

    Adaptive: ``coef * (1 + clip(kl / target - 1, +-0.2) * n / horizon)`` with kl the mean per response (Ziegler et al.
    2019, arXiv 1909.08593, sec. 2.2). A fixed coefficient does not change.
    """
    if not config.use_adaptive_kl_ctl or n_responses == 0:
        return coef
    error = kl_sum / n_responses / config.adaptive_kl_target - 1.0
    return coef * (1.0 + min(max(error, -0.2), 0.2) * n_responses / config.adaptive_kl_horizon)
