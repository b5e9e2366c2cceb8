"""PPO: the actor's and the critic's halves. The formulas are in ppo_math; here they meet batches and engines."""

from dataclasses import dataclass

import torch
from torch import Tensor

from realhf.algorithms.generation import draw_answers, train_temperature
from realhf.algorithms.ppo_math import (
    ValueNorm,
    actor_loss,
    answer_mask,
    critic_loss,
    early_stop_limits,
    kl_coefficient,
    loss_mask,
    next_kl_coefficient,
    to_states,
    token_rewards,
)
from realhf.algorithms.stats import add_stats, mean_of
from realhf.api.config import PPOConfig
from realhf.api.engine import Engine, InterfaceContext, Limits, Loss, LossFn, Outputs
from realhf.api.messages import State, Stats
from realhf.data.batch import Column, SequenceBatch
from realhf.ops.gae import packed_gae
from realhf.ops.masked import group_normalise, masked_sums, normalise

VALUE_LOSSES = ("mse", "huber")


@dataclass(frozen=True)
class Rollout:
    """What follows from a batch with its rewards, before any model is asked: ``[T]`` columns of actions."""

    kl: Tensor  # log p - log ref on answers, 0 elsewhere
    answers: Tensor  # bool
    trained: Tensor  # bool, the loss mask
    values: Tensor  # of states, in units of rewards
    advantages: Tensor
    returns: Tensor
    n_rows: int

    @property
    def kl_sums(self) -> Tensor:
        """Sum of the KL of all answers, and their number, ``[2]`` float64."""
        total = self.kl.double().sum()
        return torch.stack([total, torch.full_like(total, self.n_rows)])

    def stats(self, rewards: Tensor, kl_coef: float) -> Stats:
        """Statistics of these rows; ``advantage`` is before normalisation."""
        return {
            "reward": mean_of(rewards),
            "kl": mean_of(self.kl, self.answers),
            "kl_per_answer": (float(self.kl.double().sum()), float(self.n_rows)),
            "kl_coef": (kl_coef, 1.0),
            "advantage": mean_of(self.advantages, self.trained),
            "advantage_sq": mean_of(self.advantages.double().square(), self.trained),
            "return": mean_of(self.returns, self.trained),
        }


def roll_out(batch: SequenceBatch, config: PPOConfig, kl_coef: float) -> Rollout:
    """Return rewards turned into advantages and returns (before normalisation). Reads the input columns of training."""
    lengths = batch.lengths("tokens")
    truncated = batch["truncated"].bool()
    answers = answer_mask(batch["prompt_mask"], lengths)
    kl = (batch["logprobs"] - batch["ref_logprobs"]).masked_fill(~answers, 0.0)
    values = torch.zeros_like(kl) if config.disable_value else batch["values"]
    rewards = token_rewards(kl, batch["rewards"], truncated, lengths, kl_coef, config)
    advantages, returns = packed_gae(rewards, values, lengths, truncated, config.discount, config.gae_lambda)
    trained = loss_mask(answers, truncated, lengths, config.mask_too_long)
    return Rollout(kl, answers, trained, values, advantages, returns, len(batch))


def train_minibatches(
    engine: Engine, ready: SequenceBatch, minibatch: Tensor, config: PPOConfig, loss_fn: LossFn, limits: Limits
) -> Stats:
    """Make one optimizer step per mini-batch, the same number on every rank, and merge the statistics.

    ``ready`` has the columns that ``loss_fn`` reads, ``loss_mask`` among them; ``minibatch`` is ``[B]`` int64.
    """
    numbers = minibatch.tolist()
    if any(not 0 <= k < config.ppo_n_minibatches for k in numbers):
        raise ValueError(f"mini-batch numbers {sorted(set(numbers))}, but ppo_n_minibatches={config.ppo_n_minibatches}")
    stats: Stats = {}
    for k in range(config.ppo_n_minibatches):
        part = ready.select([i for i, number in enumerate(numbers) if number == k])
        stats = add_stats(stats, engine.train(part, loss_fn, float(part["loss_mask"].sum()), limits))
    return stats


def updated_kl_coefficient(engine: Engine, rollout: Rollout, kl_coef: float, config: PPOConfig) -> float:
    """Return the next KL coefficient from the KL of all ranks' answers. Collective."""
    kl_sum, n_answers = engine.reduce(rollout.kl_sums).tolist()
    return next_kl_coefficient(kl_coef, kl_sum, n_answers, config)


class PPOActor:
    """Generates answers, scores them as the reference does, and trains the policy.

    Columns of training: ``tokens prompt_mask logprobs ref_logprobs`` per token, ``values`` too unless disable_value;
    ``truncated rewards minibatch`` per row. Old log-probabilities are those of generation. Its state is ``kl_coef``.
    """

    config_type = PPOConfig

    def __init__(self, config: PPOConfig, context: InterfaceContext) -> None:
        self.config = config
        self.context = context
        self.temperature = train_temperature(config.gen)

    def generate(self, engine: Engine, batch: SequenceBatch, state: State) -> tuple[SequenceBatch, Stats]:
        n = self.config.generation_size or self.config.group_size
        return draw_answers(engine, batch, self.config.gen, n, self.context.seed)

    def inference(self, engine: Engine, batch: SequenceBatch, state: State) -> tuple[SequenceBatch, Stats]:
        """Make ``ref_logprobs``, at the temperature of generation."""
        logprobs = engine.forward(batch.only(("tokens",)), lambda outputs, _: outputs.logprobs(self.temperature))
        return SequenceBatch(batch.ids, {"ref_logprobs": Column(logprobs, batch.lengths("tokens"))}), {}

    def train_step(self, engine: Engine, batch: SequenceBatch, state: State) -> tuple[Stats, State]:
        kl_coef = kl_coefficient(state, self.config)
        rollout = roll_out(batch, self.config, kl_coef)
        advantages = self.normalised_advantages(engine, batch, rollout)
        ready = batch.only(("tokens", "logprobs"))
        ready = ready.with_tokenwise("advantages", advantages).with_tokenwise("loss_mask", rollout.trained.byte())
        next_coef = updated_kl_coefficient(engine, rollout, kl_coef, self.config)
        limits = early_stop_limits(self.config)
        stats = train_minibatches(engine, ready, batch["minibatch"], self.config, self.loss, limits)
        return {**stats, **rollout.stats(batch["rewards"], kl_coef)}, {**state, "kl_coef": next_coef}

    def normalised_advantages(self, engine: Engine, batch: SequenceBatch, rollout: Rollout) -> Tensor:
        """Normalise over the global batch, or over each prompt's answers, as configured. Collective for the former."""
        if self.config.group_adv_norm:
            prompts = [row.prompt for row in batch.ids]
            return group_normalise(rollout.advantages, rollout.trained, batch.lengths("tokens"), prompts)
        if self.config.adv_norm:
            sums = engine.reduce(masked_sums(rollout.advantages, rollout.trained))
            return normalise(rollout.advantages, rollout.trained, sums)
        return rollout.advantages.masked_fill(~rollout.trained, 0.0)

    def loss(self, outputs: Outputs, batch: SequenceBatch) -> Loss:
        logprobs = outputs.logprobs(self.temperature)
        return actor_loss(logprobs, batch["logprobs"], batch["advantages"], batch["loss_mask"], self.config.eps_clip)


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
        rollout = roll_out(batch, self.config, kl_coef)
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
        stats = {**stats, **rollout.stats(batch["rewards"], kl_coef), "value": mean_of(rollout.values, trained)}
        return stats, next_state

    def value_norm(self, state: State) -> ValueNorm:
        return ValueNorm.load(self.config, state.get("value_norm", {}))

    def loss(self, outputs: Outputs, batch: SequenceBatch) -> Loss:
        values = outputs.values()
        return critic_loss(values, batch["old_values"], batch["targets"], batch["loss_mask"], self.config)
