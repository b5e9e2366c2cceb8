"""PPO: the actor's and the critic's halves. The formulas are in ppo_math; here they meet batches and engines."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from realhf.algorithms.policy_gradient.advantages import whiten
from realhf.algorithms.policy_gradient.generation import sample_responses, train_temperature
from realhf.algorithms.policy_gradient.kl import kl_coefficient, next_kl_coefficient
from realhf.algorithms.policy_gradient.policy_loss import (
    actor_loss,
    denominator,
    early_stop_limits,
    token_weights,
)
from realhf.algorithms.policy_gradient.ppo_formulas import ValueNorm, critic_loss, to_states
from realhf.algorithms.policy_gradient.signals import TrainingSignals, compute_signals, rollout_stats
from realhf.algorithms.stats import add_stats, mean_of
from realhf.api.config import KLPlace, LossAggregation, PPOConfig
from realhf.api.messages import State, Stats
from realhf.data.batch import Column, SequenceBatch
from realhf.data.protocols import Engine, InterfaceContext, Limits, Loss, LossFn, Outputs
from realhf.ops.masked import group_normalise, masked_sums, normalise
from realhf.ops.rows import PackedRows, per_token

VALUE_LOSSES = ("mse", "huber")


def tokens_trained(part: SequenceBatch) -> float:
    return float(part["loss_mask"].sum())


def train_minibatches(
    engine: Engine,
    ready: SequenceBatch,
    minibatch: Tensor,
    config: PPOConfig,
    loss_fn: LossFn,
    limits: Limits,
    count: Callable[[SequenceBatch], float] = tokens_trained,
) -> Stats:
    """Make one optimizer step per mini-batch, the same number on every rank, and merge the statistics.

    ``ready`` has the columns that ``loss_fn`` reads, ``loss_mask`` among them; ``minibatch`` is ``[B]`` int64;
    ``count`` is this worker's share of the denominator of a mini-batch.
    """
    stats: Stats = {}
    for number, part in enumerate(split_minibatches(ready, minibatch, config.ppo_n_minibatches)):
        found = engine.train(part, loss_fn, count(part), limits)
        if number:  # weights have changed since: that they differ from the generator's is no mismatch
            found = {name: value for name, value in found.items() if name != "logprob_diff"}
        stats = add_stats(stats, found)
    return stats


def split_minibatches(ready: SequenceBatch, minibatch: Tensor, n: int) -> list[SequenceBatch]:
    numbers = minibatch.tolist()
    if any(not 0 <= k < n for k in numbers):
        raise ValueError(f"mini-batch numbers {sorted(set(numbers))}, but ppo_n_minibatches={n}")
    return ready.split([[i for i, number in enumerate(numbers) if number == k] for k in range(n)])


def updated_kl_coefficient(engine: Engine, rollout: TrainingSignals, kl_coef: float, config: PPOConfig) -> float:
    """Return the next KL coefficient from the KL of all ranks' answers. Collective."""
    kl_sum, n_answers = engine.reduce(rollout.kl_sums).tolist()
    return next_kl_coefficient(kl_coef, kl_sum, n_answers, config)


def step_threshold(engine: Engine, batch: SequenceBatch, config: PPOConfig) -> float:
    """Return Clip's threshold of step rewards: as configured, or the mean of all ranks' steps. Collective."""
    if "step_rewards" not in batch.columns or not config.prm.clip or config.prm.eta is not None:
        return config.prm.eta or 0.0
    steps = batch["step_rewards"]
    total, _, count = engine.reduce(masked_sums(steps, steps > 0)).tolist()
    return total / max(count, 1.0)


class PPOActor:
    """Generates answers, scores them as the reference does, and trains the policy.

    Columns of training: ``tokens prompt_mask logprobs`` per token, with a reference ``ref_logprobs``, with a critic
    ``values``, with recompute_logprobs ``prox_logprobs``; ``truncated rewards minibatch`` per row. Its state is
    ``kl_coef``.
    """

    config_type = PPOConfig

    def __init__(self, config: PPOConfig, context: InterfaceContext) -> None:
        self.config = config
        self.context = context
        self.temperature = train_temperature(config.gen)

    def generate(self, engine: Engine, batch: SequenceBatch, state: State) -> tuple[SequenceBatch, Stats]:
        n = self.config.generation_size or self.config.group_size
        return sample_responses(engine, batch, self.config.gen, n, self.context.seed)

    def inference(self, engine: Engine, batch: SequenceBatch, state: State) -> tuple[SequenceBatch, Stats]:
        """Make ``ref_logprobs`` (of the policy itself: ``prox_logprobs``), at the temperature of generation."""
        logprobs = engine.forward(batch.only(("tokens",)), lambda outputs, _: outputs.logprobs(self.temperature))
        column = Column(logprobs, batch.lengths("tokens"))
        return SequenceBatch(batch.ids, {"ref_logprobs": column, "prox_logprobs": column}), {}

    def train_step(self, engine: Engine, batch: SequenceBatch, state: State) -> tuple[Stats, State]:
        config, kl_coef = self.config, kl_coefficient(state, self.config)
        rollout = compute_signals(batch, config, kl_coef, step_threshold(engine, batch, config))
        ready = self.ready(engine, batch, rollout)
        next_coef = updated_kl_coefficient(engine, rollout, kl_coef, config)
        stats = train_minibatches(engine, ready, batch["minibatch"], config, partial(self.loss, kl_coef=kl_coef),
                                  early_stop_limits(config), self.count)  # fmt: skip
        return {**stats, **rollout_stats(rollout, batch, config, kl_coef)}, {**state, "kl_coef": next_coef}

    def ready(self, engine: Engine, batch: SequenceBatch, rollout: TrainingSignals) -> SequenceBatch:
        """Return the columns that the loss reads. Collective."""
        config, rows = self.config, PackedRows(rollout.trained, batch.lengths("tokens"))
        length = config.loss_length or float(config.gen.max_new_tokens)
        ready = batch.only(("tokens",)).with_tokenwise("logprobs", rollout.logprobs)
        ready = ready.with_tokenwise("advantages", self.normalised_advantages(engine, batch, rollout))
        ready = ready.with_tokenwise("loss_mask", rollout.trained.byte())
        ready = ready.with_tokenwise("weights", token_weights(rows, config.loss_aggregation, length))
        if rollout.is_weights is not None:
            ready = ready.with_tokenwise("is_weights", rollout.is_weights)
        if config.kl_in is not KLPlace.loss:
            return ready
        mean = config.kl_loss_aggregation or config.loss_aggregation
        weights = token_weights(rows, mean, length)
        if mean is not config.loss_aggregation:  # the engine divides by the denominator of loss_aggregation
            parts = split_minibatches(ready, batch["minibatch"], config.ppo_n_minibatches)
            counts = [[self.count(part), self.count(part, mean)] for part in parts]
            factors = [loss / max(kl, 1.0) for loss, kl in engine.reduce(torch.tensor(counts)).tolist()]
            per_row = torch.tensor([factors[k] for k in batch["minibatch"].tolist()], device=weights.device)
            weights = weights * per_token(per_row, batch.lengths("tokens"))
        ref = batch.columns["ref_logprobs"]
        return ready.with_columns(ref_logprobs=ref).with_tokenwise("kl_weights", weights)

    def count(self, part: SequenceBatch, mean: LossAggregation | None = None) -> float:
        """Return what a mini-batch adds to the denominator of the loss."""
        rows = PackedRows(part["loss_mask"].bool(), part.lengths("tokens"))
        return denominator(rows, mean or self.config.loss_aggregation)

    def normalised_advantages(self, engine: Engine, batch: SequenceBatch, rollout: TrainingSignals) -> Tensor:
        """Normalise over the global batch, or over each prompt's answers, as configured. Collective for the former."""
        if self.config.group_adv_norm:
            prompts = [row.prompt for row in batch.ids]
            return group_normalise(rollout.advantages, rollout.trained, batch.lengths("tokens"), prompts)
        if self.config.adv_norm:
            sums = engine.reduce(masked_sums(rollout.advantages, rollout.trained))
            how = whiten if self.config.adv_norm_unbiased else normalise
            return how(rollout.advantages, rollout.trained, sums)
        return rollout.advantages.masked_fill(~rollout.trained, 0.0)

    def loss(self, outputs: Outputs, batch: SequenceBatch, kl_coef: float) -> Loss:
        return actor_loss(outputs.logprobs(self.temperature), batch, self.config, kl_coef)


class PPOCritic:
    """Values of states, and their training. Reads the same columns as the actor.

    Column ``values`` is in units of rewards; with value_norm the head's own output is in normalised units. Its state
    is ``value_norm`` and a ``kl_coef`` of its own, which follows the actor's because both see the same global sums.
    """

    config_type = PPOConfig

    def __init__(self, config: PPOConfig, context: InterfaceContext) -> None:
        if config.value_loss_type not in VALUE_LOSSES:
            raise ValueError(f"value_loss_type '{config.value_loss_type}' is not one of {', '.join(VALUE_LOSSES)}")
        if config.disable_value:
            raise ValueError("disable_value is set: there is no critic to run")
        self.config = config

    def inference(self, engine: Engine, batch: SequenceBatch, state: State) -> tuple[SequenceBatch, Stats]:
        """Make ``values``, denormalised with the state's statistics."""
        raw = engine.forward(batch.only(("tokens",)), lambda outputs, _: outputs.values())
        values = self.value_norm(state).denormalise(raw) if self.config.value_norm else raw
        return SequenceBatch(batch.ids, {"values": Column(values, batch.lengths("tokens"))}), {}

    def train_step(self, engine: Engine, batch: SequenceBatch, state: State) -> tuple[Stats, State]:
        kl_coef = kl_coefficient(state, self.config)
        rollout = compute_signals(batch, self.config, kl_coef, step_threshold(engine, batch, self.config))
        next_state = {**state, "kl_coef": updated_kl_coefficient(engine, rollout, kl_coef, self.config)}
        targets, old_values, trained = to_states(rollout.returns), rollout.values, to_states(rollout.trained.byte())
        if self.config.value_norm:
            before = self.value_norm(state)
            after = before.update(engine.reduce(masked_sums(targets, trained)))
            targets, old_values = after.normalise(targets), before.raw(old_values)
            next_state["value_norm"] = after.dump()
        ready = batch.only(("tokens",)).with_tokenwise("targets", targets).with_tokenwise("old_values", old_values)
        ready = ready.with_tokenwise("loss_mask", trained)
        stats = train_minibatches(engine, ready, batch["minibatch"], self.config, self.loss, {})
        stats = {**stats, **rollout_stats(rollout, batch, self.config, kl_coef)}
        return {**stats, "value": mean_of(rollout.values, trained)}, next_state

    def value_norm(self, state: State) -> ValueNorm:
        return ValueNorm.load(self.config, state.get("value_norm", {}))

    def loss(self, outputs: Outputs, batch: SequenceBatch) -> Loss:
        values = outputs.values()
        return critic_loss(values, batch["old_values"], batch["targets"], batch["loss_mask"], self.config)
