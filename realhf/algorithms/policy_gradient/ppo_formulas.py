"""The formulas of PPO as pure functions (Schulman et al. 2017, arXiv 1707.06347, and its extensions for RLHF).

Packed columns are ``[T]``: one element per token of prompt and response, 0 at a row's first token. Element t of a
column of actions (log-probabilities, rewards, advantages, returns, masks) belongs to the action that produced token t;
element t of a column of states (values) belongs to the state after token t, in which token t+1 is chosen.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn import functional

from realhf.algorithms.policy_gradient.config import PPOConfig
from realhf.api.config import ValueLossType, ValueNormType
from realhf.api.messages import State
from realhf.data.batch import SequenceBatch
from realhf.data.protocols import Loss
from realhf.ops.rows import PackedRows

HUBER_DELTA = 10.0
MIN_VARIANCE = 1e-2
VALUE_CLIP = 5.0


def response_mask(prompt_mask: Tensor, lengths: Sequence[int]) -> Tensor:
    """Return ``[T]`` bool: True on response tokens, except on a row's first token, which no action produced."""
    starts = [end - n for end, n in zip(accumulate(lengths), lengths, strict=True)]
    return (prompt_mask == 0).index_fill(0, torch.tensor(starts, dtype=torch.int64, device=prompt_mask.device), False)


def with_response_mask(inputs: SequenceBatch, batch: SequenceBatch) -> SequenceBatch:
    """Add the column ``response_mask`` of a batch with the same rows, if that has a ``prompt_mask``."""
    if "prompt_mask" not in batch.columns:
        return inputs
    return inputs.with_tokenwise("response_mask", response_mask(batch["prompt_mask"], batch.lengths("tokens")))


def wanted_tokens(batch: SequenceBatch) -> Tensor | None:
    """Return the tokens whose log-probabilities are read, ``[T]`` bool; None: all."""
    return batch["response_mask"] if "response_mask" in batch.columns else None


def outcome_rewards(rewards: Tensor, truncated: Tensor, response_lengths: Tensor, config: PPOConfig) -> Tensor:
    """Return the rewards of whole responses, ``[B]`` like the inputs: clipped, masked, then penalised for length.

    With ``mask_no_eos_with_zero`` a truncated response has 0 instead of its reward. The penalty is 0 up to
    ``max_new_tokens - overlong_buffer`` tokens, then linear to ``-overlong_penalty`` at ``max_new_tokens`` (DAPO, arXiv
    2503.14476, eq. 13). It comes last, so that a truncated response is not worth more than a finished one as long.
    """
    result = rewards.clamp(-config.max_reward_clip, config.max_reward_clip)
    if config.mask_no_eos_with_zero:
        result = result.masked_fill(truncated.bool(), 0.0)
    if not config.overlong_buffer:
        return result
    over = (response_lengths.float() - (config.gen.max_new_tokens - config.overlong_buffer)) / config.overlong_buffer
    return result - config.overlong_penalty * over.clamp(0.0, 1.0)


def token_rewards(kl: Tensor, outcomes: Tensor, rows: PackedRows, kl_coef: float) -> Tensor:
    """Return the reward of every token, ``[T]``: ``-kl_coef * kl``, plus the outcome on a row's last sampled token.

    ``kl`` is 0 outside of ``rows.mask``, the sampled tokens; ``outcomes`` are the rewards of whole responses, ``[B]``.
    A row without sampled tokens has no reward.
    """
    return (-kl_coef * kl).index_add(0, rows.last, outcomes.to(kl.dtype).masked_fill(rows.counts == 0, 0.0))


def whiten(advantages: Tensor, mask: Tensor, sums: Tensor) -> Tensor:
    """Return ``(A - mean) / sqrt(unbiased var + 1e-8)``, 0 where masked, by the global ``masked_sums``, as VinePPO."""
    total, squares, count = sums.tolist()
    mean = total / max(count, 1.0)
    variance = max(squares - count * mean**2, 0.0) / max(count - 1.0, 1.0)
    return ((advantages.double() - mean) / (variance + 1e-8) ** 0.5).masked_fill(~mask.bool(), 0.0).to(advantages.dtype)


def to_states(actions: Tensor) -> Tensor:
    """Move each action's element to the state before it, from t+1 to t. Needs 0 at the first token of rows."""
    return actions.roll(-1)


def critic_loss(values: Tensor, old_values: Tensor, targets: Tensor, mask: Tensor, config: PPOConfig) -> Loss:
    """Return the sum over ``mask`` of the larger loss of ``v`` and of ``clip(v, v_old +- value_eps_clip)``.

    The loss is ``0.5 (v - target)^2``, or huber, linear beyond +-10. All inputs are ``[T]`` columns of states, in
    normalised units. Statistics: ``critic_loss`` and ``value_clip_fraction``, the fraction of values whose clipped loss
    is larger.
    """

    def loss_of(error: Tensor) -> Tensor:
        if config.value_loss_type is ValueLossType.huber:
            return functional.huber_loss(error, torch.zeros_like(error), reduction="none", delta=HUBER_DELTA)
        return 0.5 * error.square()

    mask = mask.bool()
    limited = old_values + (values - old_values).clamp(-config.value_eps_clip, config.value_eps_clip)
    plain, clipped = loss_of(values - targets), loss_of(limited - targets)
    total = torch.maximum(plain, clipped).masked_fill(~mask, 0.0).sum()
    count = mask.sum()
    beyond = (values - old_values).abs() > config.value_eps_clip  # old + (new - old) can differ from new by rounding
    flat = (clipped > plain) & beyond & mask
    stats = {"critic_loss": (total.detach(), count), "value_clip_fraction": (flat.sum(), count)}
    return Loss(total, stats)


@dataclass(frozen=True)
class ValueNorm:
    """Running mean and variance of returns. ``first`` and ``second`` are moments times ``weight``.

    ``exp``: moving averages with decay ``beta``, where ``weight`` corrects the bias of the start at 0; ``ma``: sums
    over all steps. The variance is at least 1e-2.
    """

    config: PPOConfig
    first: float = 0.0
    second: float = 0.0
    weight: float = 0.0

    def dump(self) -> State:
        """Return the arguments that restore the statistics."""
        return {"first": self.first, "second": self.second, "weight": self.weight}

    @property
    def mean(self) -> float:
        return self.first / max(self.weight, self.config.value_norm_eps)

    @property
    def std(self) -> float:
        second = self.second / max(self.weight, self.config.value_norm_eps)
        return max(second - self.mean**2, MIN_VARIANCE) ** 0.5

    def update(self, sums: Tensor) -> "ValueNorm":
        """Add the global (sum, sum of squares, count) of returns, ``[3]`` float64; no change for a count of 0."""
        total, squares, count = sums.tolist()
        if count == 0:
            return self
        if self.config.value_norm_type is ValueNormType.ma:
            return replace(self, first=self.first + total, second=self.second + squares, weight=self.weight + count)
        keep, take = self.config.value_norm_beta, 1.0 - self.config.value_norm_beta
        first, second = keep * self.first + take * total / count, keep * self.second + take * squares / count
        return replace(self, first=first, second=second, weight=keep * self.weight + take)

    def normalise(self, returns: Tensor) -> Tensor:
        """Return the targets of the critic, clamped to +-5."""
        return self.raw(returns).clamp(-VALUE_CLIP, VALUE_CLIP)

    def raw(self, values: Tensor) -> Tensor:
        """Return values in normalised units, unclipped: the inverse of ``denormalise``."""
        return (values - self.mean) / self.std

    def denormalise(self, raw: Tensor) -> Tensor:
        return raw * self.std + self.mean
