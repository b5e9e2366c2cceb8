"""Corrections for a generator that differs from the trainer, the values of ``ppo.importance``. Imports no torch.

They apply with recomputed log-probabilities (``ppo.recompute_logprobs``). The ratio of a token is its probability under
the trainer before the first step over that under the generator, which had older weights or another precision. Rejected
tokens are not trained and do not count in the means of the loss.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from realhf.algorithms.policy_gradient.components import Component
from realhf.api.config import opt
from realhf.api.config.option import NON_NEGATIVE, POSITIVE

if TYPE_CHECKING:
    from torch import Tensor

    from realhf.algorithms.policy_gradient.config import PPOConfig
    from realhf.ops.rows import PackedRows


@dataclass(frozen=True)
class Mismatch:
    """``log_ratio`` of the sampled tokens, ``[T]``, limited so that it is finite after ``exp``, 0 elsewhere.

    ``rows`` has the sampled tokens, ``cap`` is ``ppo.is_weight_cap``.
    """

    log_ratio: Tensor
    rows: PackedRows
    cap: float

    @property
    def of_sequences(self) -> Tensor:
        """The ratio of whole responses at all their tokens, ``[T]``."""
        from realhf.ops.rows import per_token

        limit = self.log_ratio.new_tensor(80.0)  # exp is finite in float32
        return per_token(self.rows.sums(self.log_ratio), self.rows.lengths).clamp(-limit, limit).exp()


@dataclass(frozen=True)
class Correction:
    """The weight of every token in the loss, ``[T]``, and which tokens are trained (bool; None: all)."""

    weights: Tensor
    is_kept: Tensor | None = None


@dataclass
class BandOptions:
    low: float = opt(0.5, "smallest ratio that is kept", NON_NEGATIVE)
    high: float = opt(5.0, "largest ratio that is kept", POSITIVE)


@dataclass
class GeometricOptions:
    low: float = opt(0.99, "smallest geometric mean of the ratios of a response that is kept", NON_NEGATIVE)
    high: float = opt(1.01, "largest geometric mean that is kept", POSITIVE)


def none(x: Mismatch, _: None) -> Correction:
    return Correction(x.log_ratio.new_ones(len(x.log_ratio)))


def tis(x: Mismatch, _: None) -> Correction:
    """Return ``min(r, cap)`` per token."""
    return Correction(x.log_ratio.exp().clamp(max=x.cap))


def sequence_tis(x: Mismatch, _: None) -> Correction:
    """Return ``min(prod r, cap)`` per response."""
    return Correction(x.of_sequences.clamp(max=x.cap))


def mis(x: Mismatch, _: None) -> Correction:
    """Return ``r`` per token, and reject tokens with ``r > cap``."""
    ratio = x.log_ratio.exp()
    return Correction(ratio, ratio <= x.cap)


def sequence_mis(x: Mismatch, _: None) -> Correction:
    """Return ``prod r`` per response, and reject responses with a larger one than ``cap``."""
    ratio = x.of_sequences
    return Correction(ratio.clamp(max=x.cap), ratio <= x.cap)


def icepop(x: Mismatch, options: BandOptions) -> Correction:
    """Return ``r`` per token, and reject tokens with a ratio outside of a band on both sides."""
    ratio = x.log_ratio.exp()
    return Correction(ratio, (ratio >= options.low) & (ratio <= options.high))


def geometric(x: Mismatch, options: GeometricOptions) -> Correction:
    """Return ``tis``, and reject responses whose geometric mean ratio is outside of a band."""
    mean = x.rows.mean(x.log_ratio).exp()
    return Correction(tis(x, None).weights, (mean >= options.low) & (mean <= options.high))


def check_band(ppo: PPOConfig) -> list[str]:
    name = ppo.importance.value
    band = getattr(ppo.corrections, name)
    return [] if band.low <= 1.0 <= band.high else [
        f"ppo.corrections.{name}: the band {band.low:g} to {band.high:g} must contain 1, the ratio of equal policies"
    ]  # fmt: skip


def check_cap(ppo: PPOConfig) -> list[str]:
    name, cap = ppo.importance.value, ppo.is_weight_cap
    return [] if cap >= 1.0 else [f"ppo.importance={name} rejects the ratio 1 of equal policies: it is larger than "
                                  f"ppo.is_weight_cap={cap:g}"]  # fmt: skip


CORRECTIONS: dict[str, Component[Mismatch, Correction]] = {
    "tis": Component(tis, "truncated token weights (decoupled PPO, arXiv 2505.24298, eq. 5; arXiv 1802.01561)"),
    "sequence_tis": Component(sequence_tis, "weights of whole responses, truncated"),
    "mis": Component(mis, "token weights, those above the cap rejected (masked importance sampling)",
                     check=check_cap),
    "sequence_mis": Component(sequence_mis, "weights of responses, larger ones rejected", check=check_cap),
    "icepop": Component(icepop, "token weights, rejected outside of a band (IcePop, arXiv 2510.18855)",
                        BandOptions, check_band),
    "geometric": Component(geometric, "truncated token weights, responses rejected by their geometric mean ratio",
                           GeometricOptions, check_band),
    "none": Component(none, "no weights: biased if generator and trainer differ"),
}  # fmt: skip
