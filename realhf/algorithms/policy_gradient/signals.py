"""Training signals of a batch of responses, computed before any optimizer step: KL, advantages, returns, masks."""

from dataclasses import dataclass

import torch
from torch import Tensor

from realhf.algorithms.distillation.teacher import TEACHER, reverse_kl, teacher_rewards, uses_column
from realhf.algorithms.policy_gradient.advantages import ADVANTAGES, AdvantageInputs
from realhf.algorithms.policy_gradient.config import LengthPenalty, PPOConfig
from realhf.algorithms.policy_gradient.length_penalties import LENGTH_PENALTIES, LengthInputs
from realhf.algorithms.policy_gradient.losses.actor_loss import mismatch_of
from realhf.algorithms.policy_gradient.losses.corrections import CORRECTIONS
from realhf.algorithms.policy_gradient.losses.kl import kl_terms
from realhf.algorithms.policy_gradient.ppo_formulas import outcome_rewards, response_mask, token_rewards
from realhf.algorithms.policy_gradient.prm_rewards import shape_step_rewards
from realhf.algorithms.stats import mean_of
from realhf.api.config import KLEstimator, KLPlace
from realhf.api.messages import Stats
from realhf.data.batch import SequenceBatch
from realhf.data.protocols import Engine
from realhf.ops.rows import PackedRows, masked_sums, per_token


@dataclass(frozen=True)
class TrainingSignals:
    """``[T]`` columns of actions. ``logprobs`` belong to the policy before the first optimizer step."""

    logprobs: Tensor
    kl: Tensor  # log p - log ref on responses, 0 elsewhere
    response_mask: Tensor  # bool
    loss_mask: Tensor  # bool
    values: Tensor  # of states, in units of rewards
    advantages: Tensor  # before normalisation
    returns: Tensor
    is_weights: Tensor | None
    n_rows: int


def compute_signals(
    engine: Engine, batch: SequenceBatch, config: PPOConfig, kl_coef: float, for_critic: bool = False
) -> TrainingSignals:
    """Return the signals of a training batch (columns: see ``PPOActor``). Collective with ``prm.clip``."""
    eta = step_threshold(engine, batch, config)
    lengths, truncated = batch.lengths("tokens"), batch["truncated"].bool()
    mask = response_mask(batch["prompt_mask"], lengths)
    rows = PackedRows(mask, lengths)
    logprobs = batch["prox_logprobs"] if config.recompute_logprobs else batch["logprobs"]
    kl = reference_kl(KLEstimator.k1, logprobs, batch, mask)
    in_reward = config.kl_in is KLPlace.reward
    penalty = reference_kl(config.kl_reward_estimator, logprobs, batch, mask) if in_reward else torch.zeros_like(kl)
    outcomes = outcome_rewards(batch["rewards"], truncated, rows.counts, config)
    if config.length_penalty is not LengthPenalty["none"]:
        outcomes = outcomes + length_rewards(batch, outcomes, rows.counts, config)
    rewards = token_rewards(penalty, outcomes, rows, kl_coef)
    if "turn_rewards" in batch.columns:
        rewards = with_turn_rewards(rewards, batch["turn_rewards"] * config.reward_output_scaling, rows)
    if "step_rewards" in batch.columns:
        rewards = rewards + shape_step_rewards(batch.columns["step_rewards"], config.prm, eta)
    if uses_column(config, batch, ("reverse_kl_reward",)):
        rewards = rewards + teacher_rewards(logprobs, batch, mask, config.distill)
    values = torch.zeros_like(kl) if config.disable_value else batch["values"]
    row_of_token = per_token(torch.arange(len(lengths), device=kl.device), lengths)
    trained = PackedRows(mask & ~per_token(truncated, lengths) if config.mask_too_long else mask, lengths)
    lambdas = row_lambdas(config, rows.counts, for_critic)
    inputs = AdvantageInputs(batch, rewards, values, rows, trained, row_of_token, config.discount, lambdas)
    name = config.advantage.value
    advantages, returns = ADVANTAGES[name].fn(inputs, vars(config.advantages).get(name))
    correction, loss_mask = None, trained.mask
    if config.recompute_logprobs:
        name, mismatch = config.importance.value, mismatch_of(logprobs, batch["logprobs"], rows, config.is_weight_cap)
        correction = CORRECTIONS[name].fn(mismatch, vars(config.corrections).get(name))
        if correction.is_kept is not None:
            loss_mask = loss_mask & correction.is_kept
    weights = None if correction is None else correction.weights
    return TrainingSignals(logprobs, kl, mask, loss_mask, values, advantages, returns, weights, len(batch))


def row_lambdas(config: PPOConfig, response_lengths: Tensor, for_critic: bool) -> list[float]:
    """Return the lambda of GAE for each row.

    The critic's targets may have their own (VC-PPO, arXiv 2503.01491, sec. 3.2). With ``gae_lambda_alpha`` that of the
    actor is ``1 - 1 / (alpha * length)``, so that long responses see their outcome (VAPO, arXiv 2504.05118, eq. 8).
    """
    if for_critic or config.gae_lambda_alpha is None:
        own = config.critic_gae_lambda if for_critic else None
        return [config.gae_lambda if own is None else own] * len(response_lengths)
    return [max(0.0, 1.0 - 1.0 / (config.gae_lambda_alpha * max(n, 1.0))) for n in response_lengths.tolist()]


def length_rewards(batch: SequenceBatch, outcomes: Tensor, lengths: Tensor, config: PPOConfig) -> Tensor:
    """Return the rewards for the lengths of responses, ``[B]`` (``LENGTH_PENALTIES``)."""
    name = config.length_penalty.value
    inputs = LengthInputs(outcomes, lengths, [row.prompt for row in batch.ids], config.gen.max_new_tokens)
    return LENGTH_PENALTIES[name].fn(inputs, vars(config.length_penalties).get(name)).to(outcomes.dtype)


def with_turn_rewards(rewards: Tensor, turn_rewards: Tensor, rows: PackedRows) -> Tensor:
    """Move the rewards of turns, ``[T]``, from the last sampled token of each row to their own; sums do not change."""
    moved = turn_rewards.masked_fill(~rows.mask, 0.0)
    return (rewards + moved).index_add(0, rows.last, -rows.sums(moved))


def step_threshold(engine: Engine, batch: SequenceBatch, config: PPOConfig) -> float:
    """Return ``prm.eta``, or for ``prm.clip`` without it the mean step reward over all ranks. Collective."""
    if "step_rewards" not in batch.columns or not config.prm.clip or config.prm.eta is not None:
        return config.prm.eta or 0.0
    steps = batch["step_rewards"]
    total, _, count = engine.reduce(masked_sums(steps, steps >= 0)).tolist()
    return total / max(count, 1.0)


def reference_kl(estimator: KLEstimator, logprobs: Tensor, batch: SequenceBatch, mask: Tensor) -> Tensor:
    """Return an estimate of the KL to the reference on responses, ``[T]``; 0 elsewhere, and without a reference."""
    if "ref_logprobs" not in batch.columns:
        return torch.zeros_like(logprobs)
    return kl_terms(estimator, logprobs, batch["ref_logprobs"], logprobs).masked_fill(~mask, 0.0)


def signal_stats(signals: TrainingSignals, batch: SequenceBatch, config: PPOConfig, kl_coef: float) -> Stats:
    """Return statistics of these rows; ``advantage`` is before normalisation, KL in nats per token.

    ``logprob_diff`` is the mean of |log p of the trainer - log p of the generator|.
    """
    mask, n_rows = signals.response_mask, float(signals.n_rows)
    stats: Stats = {
        "reward": mean_of(batch["rewards"]),
        "kl": mean_of(signals.kl, mask),
        "kl_per_response": (float(signals.kl.double().sum()), n_rows),
        "kl_coef": (kl_coef, 1.0),
        "advantage": mean_of(signals.advantages, signals.loss_mask),
        "advantage_sq": mean_of(signals.advantages.double().square(), signals.loss_mask),
        "return": mean_of(signals.returns, signals.loss_mask),
    }
    for estimator in config.kl_monitor:
        terms = reference_kl(estimator, signals.logprobs, batch, mask)
        stats[f"kl_{estimator.value}"] = mean_of(terms, mask)
        stats[f"kl_{estimator.value}_per_response"] = (float(terms.double().sum()), n_rows)
    if TEACHER in batch.columns:
        stats["teacher_kl"] = mean_of(reverse_kl(signals.logprobs, batch, mask), mask)
    if signals.is_weights is not None:
        stats["is_weight"] = mean_of(signals.is_weights, mask)
        stats["is_rejected"] = mean_of((~signals.loss_mask).float(), mask)
        stats["logprob_diff"] = mean_of((signals.logprobs - batch["logprobs"]).abs(), mask)
    return stats
