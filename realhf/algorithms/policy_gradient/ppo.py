"""The interfaces of generation, and of the PPO actor and critic."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from realhf.algorithms.distillation.teacher import teacher_rewards, uses_column
from realhf.algorithms.policy_gradient.config import PPOConfig
from realhf.algorithms.policy_gradient.losses.actor_loss import actor_loss, denominator, token_weights
from realhf.algorithms.policy_gradient.losses.covariances import select_tokens
from realhf.algorithms.policy_gradient.losses.distribution_terms import loss_keys, with_distribution_terms
from realhf.algorithms.policy_gradient.losses.kl import kl_coefficient, next_kl_coefficient
from realhf.algorithms.policy_gradient.ppo_formulas import (
    ValueNorm,
    critic_loss,
    to_states,
    wanted_tokens,
    whiten,
    with_response_mask,
)
from realhf.algorithms.policy_gradient.signals import TrainingSignals, compute_signals, signal_stats
from realhf.algorithms.stats import add_stats, mean_of
from realhf.api.config import GenerationConfig, KLPlace, LossAggregation
from realhf.api.messages import State, Stats
from realhf.data.batch import Column, SequenceBatch
from realhf.data.protocols import Engine, InterfaceContext, Limits, Loss, LossFn, Outputs
from realhf.ops.rows import PackedRows, group_normalise, masked_sums, normalise, per_token


def train_minibatches(
    engine: Engine, parts: list[SequenceBatch], loss_fn: LossFn, limits: Limits, count: Callable[[SequenceBatch], float]
) -> Stats:
    """Make one optimizer step per mini-batch, the same number on every rank, and merge the statistics.

    ``parts`` have the columns that ``loss_fn`` reads; ``count`` returns this worker's share of the divisor of a part.
    """
    stats: Stats = {}
    for number, part in enumerate(parts):
        step_stats = engine.train(part, loss_fn, count(part), limits)
        if number:  # after the first step a difference from the generator is expected
            step_stats = {name: value for name, value in step_stats.items() if name != "logprob_diff"}
        stats = add_stats(stats, step_stats)
    return stats


def split_minibatches(ready: SequenceBatch, minibatch: Tensor, n: int) -> list[SequenceBatch]:
    """Split by the numbers ``minibatch``, ``[B]`` int64; ValueError for a number out of range."""
    numbers = minibatch.tolist()
    if any(not 0 <= k < n for k in numbers):
        raise ValueError(f"mini-batch numbers {sorted(set(numbers))}, but ppo_n_minibatches={n}")
    return ready.split([[i for i, number in enumerate(numbers) if number == k] for k in range(n)])


def updated_kl_coefficient(engine: Engine, signals: TrainingSignals, kl_coef: float, config: PPOConfig) -> float:
    """Return the next KL coefficient from the responses of all ranks. Collective."""
    kl_sum = signals.kl.double().sum()
    total, n_responses = engine.reduce(torch.stack([kl_sum, torch.full_like(kl_sum, signals.n_rows)])).tolist()
    return next_kl_coefficient(kl_coef, total, n_responses, config)


def sample_responses(
    engine: Engine, batch: SequenceBatch, config: GenerationConfig, n: int, seed: int, record_experts: bool = False
) -> tuple[SequenceBatch, Stats]:
    """Sample ``n`` responses to every row of column ``prompts``; arguments and columns as in Engine.generate.

    Statistics: ``response_length`` (tokens including the stop token), ``truncated`` (fraction of responses without a
    stop token), ``prompt_length``.
    """
    responses = engine.generate(batch.only(("prompts",)), config, n, seed, record_experts)
    return responses, {
        "response_length": (float((responses["prompt_mask"] == 0).sum()), float(len(responses))),
        "truncated": mean_of(responses["truncated"]),
        "prompt_length": (float(sum(batch.lengths("prompts"))), float(len(batch))),
    }


def engine_keys(batch: SequenceBatch) -> list[str]:
    """Return the columns that an engine reads by itself."""
    return [key for key in ("tokens", "routed_experts") if key in batch.columns]


class Generate:
    """Samples ``config.n`` responses per prompt."""

    config_type = GenerationConfig

    def __init__(self, config: GenerationConfig, context: InterfaceContext) -> None:
        self.config, self.context = config, context

    def generate(self, engine: Engine, batch: SequenceBatch, state: State) -> tuple[SequenceBatch, Stats]:
        return sample_responses(engine, batch, self.config, self.config.n, self.context.seed)


class PPOActor:
    """Samples responses, computes reference log-probs, and trains the policy.

    Columns of training: ``tokens prompt_mask logprobs`` per token, with a reference ``ref_logprobs``, with a critic
    ``values``, with recompute_logprobs ``prox_logprobs``, with a teacher its column; ``truncated rewards minibatch``
    per row; and the columns of the advantage estimator. Its state is ``kl_coef``.
    """

    config_type = PPOConfig

    def __init__(self, config: PPOConfig, context: InterfaceContext) -> None:
        self.config, self.context = config, context
        self.temperature = 1.0 if config.gen.greedy else config.gen.temperature or 1.0  # that of sampling
        limits = {"importance_ratio": config.early_stop_imp_ratio, "approx_kl": config.early_stop_kl}
        self.limits = {name: limit for name, limit in limits.items() if limit is not None}

    def generate(self, engine: Engine, batch: SequenceBatch, state: State) -> tuple[SequenceBatch, Stats]:
        n = self.config.generation_size or self.config.group_size
        return sample_responses(engine, batch, self.config.gen, n, self.context.seed, self.config.router_replay)

    def inference(self, engine: Engine, batch: SequenceBatch, state: State) -> tuple[SequenceBatch, Stats]:
        """Return ``ref_logprobs`` (``prox_logprobs`` if run by the actor), at the temperature of generation.

        With column ``prompt_mask`` those of responses, and 0 elsewhere.
        """
        inputs, temperature = with_response_mask(batch.only(engine_keys(batch)), batch), self.temperature
        logprobs = engine.forward(inputs, lambda outputs, part: outputs.logprobs(temperature, wanted_tokens(part)))
        column = Column(logprobs, batch.lengths("tokens"))
        return SequenceBatch(batch.ids, {"ref_logprobs": column, "prox_logprobs": column}), {}

    def train_step(self, engine: Engine, batch: SequenceBatch, state: State) -> tuple[Stats, State]:
        config, kl_coef = self.config, kl_coefficient(state, self.config)
        signals = compute_signals(engine, batch, config, kl_coef)
        next_coef = updated_kl_coefficient(engine, signals, kl_coef, config)
        stats: Stats = {"entropy": mean_of(-signals.logprobs, signals.loss_mask)}
        if engine.version >= config.value_pretrain_steps:
            ready = self.loss_columns(engine, batch, signals)
            parts = split_minibatches(ready, batch["minibatch"], config.ppo_n_minibatches)
            stats |= train_minibatches(engine, parts, partial(self.loss, kl_coef=kl_coef), self.limits, self.count)
        return {**stats, **signal_stats(signals, batch, config, kl_coef)}, {**state, "kl_coef": next_coef}

    def loss_columns(self, engine: Engine, batch: SequenceBatch, signals: TrainingSignals) -> SequenceBatch:
        """Return the columns that the loss reads. Collective."""
        config, rows = self.config, PackedRows(signals.loss_mask, batch.lengths("tokens"))
        length = config.loss_length or float(config.gen.max_new_tokens)
        ready = batch.only(engine_keys(batch)).with_tokenwise("logprobs", signals.logprobs)
        advantages = self.normalised_advantages(engine, batch, signals)
        if uses_column(config, batch, ("reverse_kl",)):
            advantages = advantages + teacher_rewards(signals.logprobs, batch, signals.loss_mask, config.distill)
        ready = ready.with_tokenwise("advantages", advantages)
        selected = select_tokens(engine, batch, signals.logprobs, advantages, signals.loss_mask, config)
        if selected is not None:
            ready = ready.with_tokenwise("is_selected", selected.byte())
        ready = ready.with_tokenwise("loss_mask", signals.loss_mask.byte())
        ready = ready.with_tokenwise("weights", token_weights(rows, config.loss_aggregation, length))
        if signals.is_weights is not None:
            ready = ready.with_tokenwise("is_weights", signals.is_weights)
        ready = ready.with_columns(**{key: batch.columns[key] for key in loss_keys(config, batch)})
        if config.kl_in is not KLPlace.loss:
            return ready
        aggregation = config.kl_loss_aggregation or config.loss_aggregation
        weights = token_weights(rows, aggregation, length)
        if aggregation is not config.loss_aggregation:  # the engine divides by the denominator of loss_aggregation
            parts = split_minibatches(ready, batch["minibatch"], config.ppo_n_minibatches)
            counts = [[self.count(part), self.count(part, aggregation)] for part in parts]
            factors = [loss / max(kl, 1.0) for loss, kl in engine.reduce(torch.tensor(counts)).tolist()]
            per_row = torch.tensor([factors[k] for k in batch["minibatch"].tolist()], device=weights.device)
            weights = weights * per_token(per_row, batch.lengths("tokens"))
        ref = batch.columns["ref_logprobs"]
        return ready.with_columns(ref_logprobs=ref).with_tokenwise("kl_weights", weights)

    def count(self, part: SequenceBatch, aggregation: LossAggregation | None = None) -> float:
        rows = PackedRows(part["loss_mask"].bool(), part.lengths("tokens"))
        return denominator(rows, aggregation or self.config.loss_aggregation)

    def normalised_advantages(self, engine: Engine, batch: SequenceBatch, signals: TrainingSignals) -> Tensor:
        """Normalise over the global batch (collective), or over the responses to each prompt."""
        if self.config.group_adv_norm:
            prompts = [row.prompt for row in batch.ids]
            return group_normalise(signals.advantages, signals.loss_mask, batch.lengths("tokens"), prompts)
        if self.config.adv_norm:
            sums = engine.reduce(masked_sums(signals.advantages, signals.loss_mask))
            norm = whiten if self.config.adv_norm_unbiased else normalise
            return norm(signals.advantages, signals.loss_mask, sums)
        return signals.advantages.masked_fill(~signals.loss_mask, 0.0)

    def loss(self, outputs: Outputs, batch: SequenceBatch, kl_coef: float) -> Loss:
        logprobs = outputs.logprobs(self.temperature, batch["loss_mask"])
        loss = actor_loss(logprobs, batch, self.config, kl_coef)
        return with_distribution_terms(loss, logprobs, outputs, batch, self.config, self.temperature)


class PPOCritic:
    """Computes the values of states, and trains the critic. Reads the same columns as the actor.

    Column ``values`` is in units of rewards; with value_norm the head predicts normalised values. The state is
    ``value_norm`` and a ``kl_coef`` that equals the actor's, because both are updated from the same global sums.
    """

    config_type = PPOConfig

    def __init__(self, config: PPOConfig, context: InterfaceContext) -> None:
        if config.disable_value:
            raise ValueError("disable_value is set: there is no critic to run")
        self.config = config

    def inference(self, engine: Engine, batch: SequenceBatch, state: State) -> tuple[SequenceBatch, Stats]:
        raw = engine.forward(batch.only(("tokens",)), lambda outputs, _: outputs.values())
        values = self.value_norm(state).denormalise(raw) if self.config.value_norm else raw
        return SequenceBatch(batch.ids, {"values": Column(values, batch.lengths("tokens"))}), {}

    def train_step(self, engine: Engine, batch: SequenceBatch, state: State) -> tuple[Stats, State]:
        config, kl_coef = self.config, kl_coefficient(state, self.config)
        signals = compute_signals(engine, batch, config, kl_coef, for_critic=True)
        next_state = {**state, "kl_coef": updated_kl_coefficient(engine, signals, kl_coef, config)}
        targets, old_values, mask = to_states(signals.returns), signals.values, to_states(signals.loss_mask.byte())
        if config.value_norm:
            before = self.value_norm(state)
            after = before.update(engine.reduce(masked_sums(targets, mask)))
            targets, old_values = after.normalise(targets), before.raw(old_values)
            next_state["value_norm"] = after.dump()
        ready = batch.only(("tokens",)).with_tokenwise("targets", targets).with_tokenwise("old_values", old_values)
        ready = ready.with_tokenwise("loss_mask", mask)
        parts = split_minibatches(ready, batch["minibatch"], config.ppo_n_minibatches)
        stats = train_minibatches(engine, parts, self.loss, {}, lambda part: float(part["loss_mask"].sum()))
        stats = {**stats, **signal_stats(signals, batch, config, kl_coef)}
        return {**stats, "value": mean_of(signals.values, mask)}, next_state

    def value_norm(self, state: State) -> ValueNorm:
        return ValueNorm(self.config, **state.get("value_norm", {}))

    def loss(self, outputs: Outputs, batch: SequenceBatch) -> Loss:
        return critic_loss(
            outputs.values(batch["loss_mask"]), batch["old_values"], batch["targets"], batch["loss_mask"], self.config
        )
