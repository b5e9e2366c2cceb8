"""What follows from answers and their rewards before any model is trained: KL, advantages, returns, masks."""

from dataclasses import dataclass

import torch
from torch import Tensor

from realhf.algorithms.policy_gradient.advantages import (
    group_advantages,
    leave_one_out,
    overlong_penalties,
    process_advantages,
)
from realhf.algorithms.policy_gradient.kl import kl_terms
from realhf.algorithms.policy_gradient.policy_loss import truncated_is_weights
from realhf.algorithms.policy_gradient.ppo_formulas import answer_mask, loss_mask, token_rewards
from realhf.algorithms.policy_gradient.prm_rewards import shape_step_rewards
from realhf.algorithms.stats import mean_of
from realhf.api.config import Advantage, KLEstimator, KLPlace, PPOConfig
from realhf.api.messages import Stats
from realhf.data.batch import SequenceBatch
from realhf.ops.gae import packed_gae
from realhf.ops.rows import PackedRows, per_token


@dataclass(frozen=True)
class TrainingSignals:
    """``[T]`` columns of actions. ``logprobs`` are of the policy that training starts from."""

    logprobs: Tensor
    kl: Tensor  # log p - log ref on answers, 0 elsewhere
    answers: Tensor  # bool
    trained: Tensor  # bool, the loss mask
    values: Tensor  # of states, in units of rewards
    advantages: Tensor
    returns: Tensor
    is_weights: Tensor | None
    n_rows: int

    @property
    def kl_sums(self) -> Tensor:
        """Sum of the KL of all answers, and their number, ``[2]`` float64."""
        total = self.kl.double().sum()
        return torch.stack([total, torch.full_like(total, self.n_rows)])


def compute_signals(batch: SequenceBatch, config: PPOConfig, kl_coef: float, eta: float = 0.0) -> TrainingSignals:
    """Return rewards turned into advantages and returns (before normalisation). Reads the input columns of training.

    ``eta`` is the threshold of step rewards.
    """
    lengths, truncated = batch.lengths("tokens"), batch["truncated"].bool()
    answers = answer_mask(batch["prompt_mask"], lengths)
    logprobs = batch["prox_logprobs"] if config.recompute_logprobs else batch["logprobs"]
    weights = truncated_is_weights(logprobs, batch["logprobs"], answers, config.is_weight_cap)
    kl = reference_kl(KLEstimator.k1, logprobs, batch, answers)
    penalty = torch.zeros_like(kl)
    if config.kl_in is KLPlace.reward:
        penalty = reference_kl(config.kl_reward_estimator, logprobs, batch, answers)
    scores = batch["rewards"]
    if config.overlong_buffer:
        n_tokens, longest = PackedRows(answers, lengths).counts, config.gen.max_new_tokens
        scores = scores + overlong_penalties(n_tokens, longest, config.overlong_buffer, config.overlong_penalty)
    rewards = token_rewards(penalty, scores, truncated, lengths, kl_coef, config)
    if "step_rewards" in batch.columns:
        rewards = rewards + shape_step_rewards(batch["step_rewards"], lengths, config.prm, eta)
    values = torch.zeros_like(kl) if config.disable_value else batch["values"]
    advantages, returns = advantages_and_returns(batch, rewards, values, answers, config)
    trained = loss_mask(answers, truncated, lengths, config.mask_too_long)
    kept_weights = weights if config.recompute_logprobs else None
    return TrainingSignals(logprobs, kl, answers, trained, values, advantages, returns, kept_weights, len(batch))


def reference_kl(estimator: KLEstimator, logprobs: Tensor, batch: SequenceBatch, answers: Tensor) -> Tensor:
    """Return an estimate of the KL to the reference on answers, ``[T]``; 0 elsewhere, and without a reference."""
    if "ref_logprobs" not in batch.columns:
        return torch.zeros_like(logprobs)
    return kl_terms(estimator, logprobs, batch["ref_logprobs"], logprobs).masked_fill(~answers, 0.0)


def advantages_and_returns(
    batch: SequenceBatch, rewards: Tensor, values: Tensor, answers: Tensor, config: PPOConfig
) -> tuple[Tensor, Tensor]:
    """Return advantages and returns of actions, ``[T]``, from the rewards of tokens."""
    lengths, prompts = batch.lengths("tokens"), [row.prompt for row in batch.ids]
    if config.advantage is Advantage.gae:
        truncated = batch["truncated"].bool()
        return packed_gae(rewards, values, lengths, truncated, config.discount, config.gae_lambda)
    scores = PackedRows(answers, lengths).sums(rewards)
    match config.advantage:
        case Advantage.group:
            per_row = group_advantages(scores, prompts, config.group_std)
        case Advantage.rloo:
            per_row = leave_one_out(scores, prompts)
        case Advantage.greedy_baseline:
            per_row = scores - batch["baseline"]
        case Advantage.process:
            steps = batch["step_rewards"]
            return process_advantages(steps, steps > 0, lengths, prompts), per_token(scores, lengths)
        case Advantage.precomputed:
            return batch["advantages"], per_token(scores, lengths)
    return per_token(per_row, lengths), per_token(scores, lengths)


def rollout_stats(rollout: TrainingSignals, batch: SequenceBatch, config: PPOConfig, kl_coef: float) -> Stats:
    """Return statistics of these rows; ``advantage`` is before normalisation, KL in nats per token.

    ``logprob_diff`` is the mean of |log p of the trainer - log p of the generator|.
    """
    stats: Stats = {
        "reward": mean_of(batch["rewards"]),
        "kl": mean_of(rollout.kl, rollout.answers),
        "kl_per_answer": (float(rollout.kl.double().sum()), float(rollout.n_rows)),
        "kl_coef": (kl_coef, 1.0),
        "advantage": mean_of(rollout.advantages, rollout.trained),
        "advantage_sq": mean_of(rollout.advantages.double().square(), rollout.trained),
        "return": mean_of(rollout.returns, rollout.trained),
    }
    for estimator in config.kl_monitor:
        terms = reference_kl(estimator, rollout.logprobs, batch, rollout.answers)
        stats[f"kl_{estimator.value}"] = mean_of(terms, rollout.answers)
        stats[f"kl_{estimator.value}_per_answer"] = (float(terms.double().sum()), float(rollout.n_rows))
    if rollout.is_weights is not None:
        stats["is_weight"] = mean_of(rollout.is_weights, rollout.answers)
        stats["logprob_diff"] = mean_of((rollout.logprobs - batch["logprobs"]).abs(), rollout.answers)
    return stats
