"""How far the policy is from its reference: estimators of the KL divergence, and the controller of its coefficient.

With tokens drawn from the policy and ``d = log p - log ref``, per token (Schulman 2020, "Approximating KL divergence"):

| | value | as a loss, its expected gradient on-policy is that of |
|---|---|---|
| k1 | ``d`` | nothing: 0 |
| k2 | ``d^2 / 2`` | KL(p || ref) |
| k3 | ``exp(-d) - 1 + d`` | KL(ref || p) |
| k4 | ``r d`` with r = p / p_old, gradients through r | KL(p || ref), off-policy too |

In the reward k1 alone is unbiased: its return-to-go holds what a token does to the divergence of those after it.
"""

import torch
from torch import Tensor

from realhf.api.config import KLEstimator, PPOConfig
from realhf.api.messages import State

LOG_RATIO_LIMIT = 40.0


def kl_terms(estimator: KLEstimator, logprobs: Tensor, ref_logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    """Return the estimate of every token in nats, in the shape of ``logprobs``, through which gradients flow.

    ``old_logprobs`` are those of the policy that drew the tokens. Differences of log-probabilities count up to +-40, so
    that a token to which the reference gives no chance stays finite.
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
    """Return the KL coefficient in force: ``kl_ctl``, or what the adaptive controller has reached."""
    return float(state.get("kl_coef", config.kl_ctl)) if config.use_adaptive_kl_ctl else config.kl_ctl


def next_kl_coefficient(coef: float, kl_sum: float, n_answers: float, config: PPOConfig) -> float:
    """Return the coefficient after a step: ``n_answers`` answers whose KL to the reference adds up to ``kl_sum`` nats.

    Adaptive: ``coef * (1 + clip(kl / target - 1, +-0.2) * n / horizon)`` with kl the mean per answer (Ziegler et al.
    2019, arXiv 1909.08593, sec. 2.2): above the target the penalty grows. Fixed: no change.
    """
    if not config.use_adaptive_kl_ctl or n_answers == 0:
        return coef
    error = kl_sum / n_answers / config.adaptive_kl_target - 1.0
    return coef * (1.0 + min(max(error, -0.2), 0.2) * n_answers / config.adaptive_kl_horizon)
