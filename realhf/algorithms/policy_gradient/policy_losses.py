"""Per-token losses, the values of ``ppo.policy_loss``. Imports no torch: options are checked without it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from realhf.algorithms.policy_gradient.components import Component

if TYPE_CHECKING:
    from torch import Tensor

    from realhf.ops.rows import PackedRows


@dataclass(frozen=True)
class PolicyLossInputs:
    """Packed columns ``[T]`` with gradients in ``logprobs``; ``log_ratio`` is log p - log p_old, 0 where masked."""

    logprobs: Tensor
    log_ratio: Tensor
    advantages: Tensor
    rows: PackedRows
    clip_low: float
    clip_high: float


@dataclass(frozen=True)
class TokenLoss:
    """The loss of every token, ``[T]``, and where clipping removes its gradient (bool; None: nowhere)."""

    loss: Tensor
    is_clipped: Tensor | None = None


def clip(x: PolicyLossInputs, _: None) -> TokenLoss:
    """Return ``max(-A r, -A clip(r, 1 - low, 1 + high))`` with ``r = exp(log_ratio)``.

    PPO (Schulman et al. 2017, arXiv 1707.06347, eq. 7); ``high > low`` is the clip-higher of DAPO (arXiv 2503.14476).
    """
    ratio = x.log_ratio.exp()
    plain, clipped = -x.advantages * ratio, -x.advantages * ratio.clamp(1.0 - x.clip_low, 1.0 + x.clip_high)
    return TokenLoss(plain.maximum(clipped), clipped > plain)


def sequence_clip(x: PolicyLossInputs, _: None) -> TokenLoss:
    """Return ``clip`` with one ratio per response, the geometric mean over its tokens (arXiv 2507.18071, eq. 5-7)."""
    return clip(replace(x, log_ratio=x.rows.mean(x.log_ratio)), None)


def cispo(x: PolicyLossInputs, _: None) -> TokenLoss:
    """Return ``-sg(clip(r, 1 - low, 1 + high)) A log p``: clipped tokens keep gradients (arXiv 2506.13585, eq. 4-5)."""
    ratio = x.log_ratio.detach().exp().clamp(1.0 - x.clip_low, 1.0 + x.clip_high)
    return TokenLoss(-ratio * x.advantages * x.logprobs)


def reinforce(x: PolicyLossInputs, _: None) -> TokenLoss:
    """Return ``-A log p``, the on-policy policy gradient without a ratio (ReMax, RLOO)."""
    return TokenLoss(-x.advantages * x.logprobs)


POLICY_LOSSES: dict[str, Component[PolicyLossInputs, TokenLoss]] = {
    "clip": Component(clip, "clipped ratio (PPO, arXiv 1707.06347, eq. 7)"),
    "sequence_clip": Component(sequence_clip, "one clipped ratio per response (GSPO, arXiv 2507.18071, eq. 5-7)"),
    "cispo": Component(cispo, "clipped importance weights (CISPO, arXiv 2506.13585, eq. 4-5)"),
    "reinforce": Component(reinforce, "no ratio, on-policy only (REINFORCE, as in arXiv 2402.14740, eq. 6)"),
}
