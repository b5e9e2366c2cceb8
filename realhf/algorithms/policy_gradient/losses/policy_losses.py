"""Per-token losses, the values of ``ppo.policy_loss``. Imports no torch: options are checked without it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from realhf.algorithms.policy_gradient.components import Component
from realhf.api.config import opt
from realhf.api.config.option import FINITE, FRACTION, NON_NEGATIVE, POSITIVE, RATIO_CAP

if TYPE_CHECKING:
    from torch import Tensor

    from realhf.algorithms.policy_gradient.config import PPOConfig
    from realhf.ops.rows import PackedRows


@dataclass(frozen=True)
class PolicyLossInputs:
    """Packed columns ``[T]`` with gradients in ``logprobs``; ``log_ratio`` is log p - log p_old, 0 where masked.

    ``is_selected`` are the tokens of high covariance, for losses that treat them apart (bool).
    """

    logprobs: Tensor
    log_ratio: Tensor
    advantages: Tensor
    rows: PackedRows
    clip_low: float
    clip_high: float
    is_selected: Tensor | None = None


@dataclass(frozen=True)
class TokenLoss:
    """The loss of every token, ``[T]``, and where clipping removes its gradient (bool; None: nowhere)."""

    loss: Tensor
    is_clipped: Tensor | None = None


@dataclass
class DualClipOptions:
    cap: float = opt(3.0, "largest ratio of an action with a negative advantage", RATIO_CAP)


@dataclass
class SapoOptions:
    tau_pos: float = opt(1.0, "temperature of the gate for positive advantages", POSITIVE)
    tau_neg: float = opt(1.05, "temperature for negative advantages", POSITIVE)


@dataclass
class ClipCovOptions:
    share: float = opt(2e-4, "share of all tokens that lose their gradient", FRACTION)
    low: float = opt(1.0, "smallest covariance of these tokens", FINITE)
    high: float = opt(5.0, "largest covariance of these tokens", FINITE)


@dataclass
class KLCovOptions:
    share: float = opt(2e-3, "share of all tokens, those of the highest covariance, that have a KL penalty", FRACTION)
    coef: float = opt(1.0, "coefficient of the KL penalty", NON_NEGATIVE)


def clip(x: PolicyLossInputs, _: None) -> TokenLoss:
    """Return ``max(-A r, -A clip(r, 1 - low, 1 + high))`` with ``r = exp(log_ratio)``.

    PPO (Schulman et al. 2017, arXiv 1707.06347, eq. 7); ``high > low`` is the clip-higher of DAPO (arXiv 2503.14476).
    """
    ratio = x.log_ratio.exp()
    plain, clipped = -x.advantages * ratio, -x.advantages * ratio.clamp(1.0 - x.clip_low, 1.0 + x.clip_high)
    return TokenLoss(plain.maximum(clipped), clipped > plain)


def dual_clip(x: PolicyLossInputs, options: DualClipOptions) -> TokenLoss:
    """Return ``clip``, for ``A < 0`` at most ``-cap A``: large ratios of bad actions have no gradient.

    Ye et al. 2020, arXiv 1912.09729.
    """
    clipped = clip(x, None)
    limit = -options.cap * x.advantages
    is_limited = (x.advantages < 0) & (clipped.loss > limit)
    assert clipped.is_clipped is not None
    return TokenLoss(clipped.loss.where(~is_limited, limit), clipped.is_clipped | is_limited)


def sapo(x: PolicyLossInputs, options: SapoOptions) -> TokenLoss:
    """Return ``-A sigmoid(tau (r - 1)) 4 / tau``, whose slope in r is A at r = 1; tau depends on the sign of A.

    SAPO (arXiv 2511.20347). Nothing is clipped: gradients decay smoothly with the distance from 1.
    """
    tau = x.advantages.new_full(x.advantages.shape, options.tau_neg).masked_fill(x.advantages > 0, options.tau_pos)
    gate = (tau * (x.log_ratio.exp() - 1.0)).sigmoid() * 4.0 / tau
    return TokenLoss(-gate * x.advantages)


def sequence_clip(x: PolicyLossInputs, _: None) -> TokenLoss:
    """Return ``clip`` with one ratio per response, the geometric mean over its tokens (arXiv 2507.18071, eq. 5-7)."""
    return clip(replace(x, log_ratio=x.rows.mean(x.log_ratio)), None)


def cispo(x: PolicyLossInputs, _: None) -> TokenLoss:
    """Return ``-sg(clip(r, 1 - low, 1 + high)) A log p``: clipped tokens keep gradients (arXiv 2506.13585, eq. 4-5)."""
    ratio = x.log_ratio.detach().exp().clamp(1.0 - x.clip_low, 1.0 + x.clip_high)
    return TokenLoss(-ratio * x.advantages * x.logprobs)


def clip_cov(x: PolicyLossInputs, options: ClipCovOptions) -> TokenLoss:
    """Return ``clip`` without gradients of the selected tokens, which would reduce the entropy most.

    Cui et al. 2025, arXiv 2505.22617, eq. 10-11; ``select_tokens`` selects.
    """
    clipped = clip(x, None)
    assert clipped.is_clipped is not None and x.is_selected is not None
    return TokenLoss(clipped.loss.detach().where(x.is_selected, clipped.loss), clipped.is_clipped | x.is_selected)


def kl_cov(x: PolicyLossInputs, options: KLCovOptions) -> TokenLoss:
    """Return ``-A r``, and for selected tokens ``+ coef (r - 1 - log r)``, an estimate of KL(old || new).

    Cui et al. 2025, arXiv 2505.22617, eq. 12-13. The published code penalises ``|log r|``, whose slope does not vanish.
    """
    assert x.is_selected is not None
    penalty = options.coef * (x.log_ratio.expm1() - x.log_ratio)
    return TokenLoss(-x.advantages * x.log_ratio.exp() + penalty * x.is_selected)


def reinforce(x: PolicyLossInputs, _: None) -> TokenLoss:
    """Return ``-A log p``, the on-policy policy gradient without a ratio (ReMax, RLOO)."""
    return TokenLoss(-x.advantages * x.logprobs)


def check_clip_cov(ppo: PPOConfig) -> list[str]:
    band = ppo.losses.clip_cov
    return [] if band.low <= band.high else [
        f"ppo.losses.clip_cov: no covariance is in the band {band.low:g} to {band.high:g}"
    ]  # fmt: skip


POLICY_LOSSES: dict[str, Component[PolicyLossInputs, TokenLoss]] = {
    "clip": Component(clip, "clipped ratio (PPO, arXiv 1707.06347, eq. 7)"),
    "sequence_clip": Component(sequence_clip, "one clipped ratio per response (GSPO, arXiv 2507.18071, eq. 5-7)"),
    "dual_clip": Component(dual_clip, "clip with a limit for negative advantages (dual clip, arXiv 1912.09729)",
                           DualClipOptions),
    "sapo": Component(sapo, "smooth gate of the ratio instead of a clip (SAPO, arXiv 2511.20347)", SapoOptions),
    "clip_cov": Component(clip_cov, "clip; some tokens whose log-prob and advantage covary lose their gradient "
                          "(clip-cov, arXiv 2505.22617)", ClipCovOptions, check_clip_cov),
    "kl_cov": Component(kl_cov, "ratio without clip; the tokens that covary most have a KL penalty (KL-cov, arXiv "
                        "2505.22617)", KLCovOptions),
    "cispo": Component(cispo, "clipped importance weights (CISPO, arXiv 2506.13585, eq. 4-5)"),
    "reinforce": Component(reinforce, "no ratio, on-policy only (REINFORCE, as in arXiv 2402.14740, eq. 6)"),
}  # fmt: skip
