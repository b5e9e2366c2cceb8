"""The interfaces of reward models: training, evaluation and scoring; and their losses."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from realhf.algorithms.policy_gradient.config import PPOConfig
from realhf.algorithms.policy_gradient.prm_rewards import aggregate
from realhf.algorithms.policy_gradient.rewards import rewards_of
from realhf.algorithms.preference.pairs import Pairs, pairs_of, ranked_pairs
from realhf.algorithms.reward_model.step_splitter import SPLITTERS, step_starts
from realhf.algorithms.stats import Monitors, mean_of, stats_of
from realhf.api.config import opt
from realhf.api.config.preference import Aggregate, EnsembleConfig, RewardModelType, RWConfig, ScoreConfig
from realhf.api.messages import State, Stats
from realhf.data.batch import Column, SequenceBatch
from realhf.data.protocols import Engine, InterfaceContext, Loss, Outputs
from realhf.ops.ensemble import check_scores, combine, variance

LABELS = {RewardModelType.outcome: "label", RewardModelType.process: "step_labels"}


class RewardModel:
    """Trains a scalar head; ``inference`` evaluates it on held-out rows and returns no column.

    Columns: ``tokens``; scalar ``label`` (outcome) or per token ``step_labels`` (process). Statistics: those of
    ``comparison_loss`` or ``label_loss``; in evaluation also ``score`` and ``score_sq`` per response or step.
    """

    config_type = RWConfig

    def __init__(self, config: RWConfig, context: InterfaceContext) -> None:
        self.config = config
        self.label = LABELS.get(config.type)

    def train_step(self, engine: Engine, batch: SequenceBatch, state: State) -> tuple[Stats, State]:
        ready = batch.only(("tokens", self.label) if self.label else ("tokens",))
        count = float((batch[self.label] >= 0).sum()) if self.label else float(len({row.prompt for row in batch.ids}))
        loss = lambda outputs, part: self.loss(self.scores(outputs), part)
        return engine.train(ready, loss, count, together=self.label is None), state

    def inference(self, engine: Engine, batch: SequenceBatch, state: State) -> tuple[SequenceBatch, Stats]:
        scores = engine.forward(batch.only(("tokens",)), lambda outputs, _: self.scores(outputs))
        stats = stats_of(self.loss(scores, batch))
        labelled = scores[batch[self.label] >= 0] if self.label else scores
        stats |= {"score": mean_of(labelled), "score_sq": mean_of(labelled.double() ** 2)}
        return SequenceBatch(batch.ids), stats

    def scores(self, outputs: Outputs) -> Tensor:
        """Return the scalar head at every token, ``[T]`` (process), or at the last token of each row, ``[B]``."""
        return outputs.values() if self.config.type is RewardModelType.process else outputs.last_values()

    def loss(self, scores: Tensor, batch: SequenceBatch) -> Loss:
        if self.label:
            return label_loss(scores, batch[self.label])
        pairs = (pairs_of if self.config.type is RewardModelType.pairs else ranked_pairs)(batch.ids)
        return comparison_loss(scores, pairs, self.config.score_l2_reg)


class PairedReward:
    """Scores responses with a model of pairs or ranked lists, by the scalar head at the last token.

    Reads ``tokens`` (and ``prompt_mask`` for the selection of responses); returns the scalar ``rewards = (score -
    reward_output_bias) * reward_output_scaling``.
    """

    config_type = PPOConfig

    def __init__(self, config: PPOConfig, context: InterfaceContext) -> None:
        self.config, self.report = config, context.report_results

    def inference(self, engine: Engine, batch: SequenceBatch, state: State) -> tuple[SequenceBatch, Stats]:
        scores = engine.forward(batch.only(("tokens",)), lambda outputs, _: outputs.last_values())
        return rewards_of(batch, scores.float(), self.config, self.report)


@dataclass
class LabelledRewardConfig:
    ppo: PPOConfig = opt(PPOConfig, "scaling and bias of rewards, selection of responses")
    score: ScoreConfig = opt(lambda: ScoreConfig(RewardModelType.outcome), "type of the model, aggregation of steps")


class LabelledReward:
    """Scores responses with a model of labelled responses or steps, by its probabilities.

    Reads ``tokens`` and ``prompt_mask``; returns the scalar ``rewards``, scaled as in ``PairedReward``, and for a
    process model ``step_rewards``: the probability of each step on its last token, unscaled, and -1 elsewhere.
    """

    config_type = LabelledRewardConfig

    def __init__(self, config: LabelledRewardConfig, context: InterfaceContext) -> None:
        if config.score.type not in LABELS:
            raise ValueError(f"a model of {config.score.type.name} returns scores, not probabilities: use paired_rw")
        self.config, self.report = config, context.report_results
        self.tokenizer = context.tokenizer
        self.split = SPLITTERS[config.score.step_splitter]

    def inference(self, engine: Engine, batch: SequenceBatch, state: State) -> tuple[SequenceBatch, Stats]:
        tokens = batch.only(("tokens",))
        if self.config.score.type is RewardModelType.outcome:
            logits = engine.forward(tokens, lambda outputs, _: outputs.last_values())
            return rewards_of(batch, logits.sigmoid().float(), self.config.ppo, self.report)
        probabilities = engine.forward(tokens, lambda outputs, _: outputs.values()).sigmoid()
        is_end = Column(torch.zeros_like(probabilities, dtype=torch.bool), batch.lengths("tokens"))
        for row, starts in zip(is_end.rows(), step_starts(batch, self.tokenizer, self.split), strict=True):
            row[[*(start - 1 for start in starts[1:]), -1]] = True
        steps = Column(probabilities[is_end.data], tuple(int(row.sum()) for row in is_end.rows()))
        scores = aggregate(steps, self.config.score.aggregate) + 0 * aggregate(steps, Aggregate.mean)  # NaN if any is
        result, stats = rewards_of(batch, scores.float(), self.config.ppo, self.report)
        dense = Column(probabilities.masked_fill(~is_end.data, -1.0), is_end.lengths)
        index = {row: i for i, row in enumerate(batch.ids)}
        return result.with_columns(step_rewards=dense.select([index[row] for row in result.ids])), stats


@dataclass
class EnsembleRewardConfig:
    ensemble: EnsembleConfig = opt(EnsembleConfig, "members and objective")
    ppo: PPOConfig = opt(PPOConfig, "scaling and bias of rewards, selection of responses")


class EnsembleReward:
    """Combines the scalars ``score_0``, ``score_1``, ... into ``rewards``, scaled as in PairedReward.

    Reads ``prompt_mask`` for the selection. Statistics over all responses: ``reward``, ``variance`` over members, and
    ``lowest_i``, the fraction of responses that member i scores lowest (the first of equal ones). ValueError for a
    score that is not finite.
    """

    config_type = EnsembleRewardConfig

    def __init__(self, config: EnsembleRewardConfig, context: InterfaceContext) -> None:
        self.config, self.report = config, context.report_results

    def inference(self, engine: Engine | None, batch: SequenceBatch, state: State) -> tuple[SequenceBatch, Stats]:
        ensemble = self.config.ensemble
        columns = [batch[f"score_{i}"] for i in range(len(ensemble.members))]
        scores = np.stack([column.double().cpu().numpy() for column in columns])  # [k, B]
        check_scores(scores, ensemble.members, batch.ids)
        total = torch.from_numpy(combine(scores, ensemble)).to(columns[0].device)
        rewarded, stats = rewards_of(batch, total, self.config.ppo, self.report)
        spread, lowest, count = variance(scores, ensemble.uwo_unbiased), scores.argmin(axis=0), float(len(batch))
        stats |= {"variance": (float(spread.sum()), count)}
        return rewarded, stats | {f"lowest_{i}": (float((lowest == i).sum()), count) for i in range(len(scores))}


def comparison_loss(scores: Tensor, pairs: Pairs, l2: float = 0.0) -> Loss:
    """Return the weighted sum of ``-logsigmoid(s_better - s_worse) + l2 / 2 (s_better^2 + s_worse^2)``.

    ``scores`` is ``[B]``. The result is the sum over prompts of the mean over their pairs (Bradley-Terry; Ouyang et al.
    2022, arXiv 2203.02155, eq. 1, for all pairs of a ranked list). Statistics: ``loss`` per prompt; ``accuracy`` (equal
    scores are wrong), ``margin``, ``chosen_score``, ``rejected_score`` per pair.
    """
    better, worse = scores[pairs.better], scores[pairs.worse]
    margin = better - worse
    terms = 0.5 * l2 * (better.square() + worse.square()) - functional.logsigmoid(margin)
    total = (terms * torch.tensor(pairs.weights, device=scores.device, dtype=scores.dtype)).sum()
    detached, count = margin.detach(), float(len(margin))
    stats = {
        "loss": (total.detach(), float(sum(pairs.weights))),
        "accuracy": ((detached > 0).sum(), count),
        "margin": (detached.sum(), count),
        "chosen_score": (better.detach().sum(), count),
        "rejected_score": (worse.detach().sum(), count),
    }
    return Loss(total, stats)


def label_loss(logits: Tensor, labels: Tensor) -> Loss:
    """Return the sum of binary cross-entropies of ``logits`` with ``labels`` in [0, 1]; negative labels are ignored.

    Both are ``[N]``: rows (outcome), or tokens with labels at the last token of each step (process; Lightman et al.
    2023, arXiv 2305.20050; soft labels as in Wang et al. 2024, arXiv 2312.08935). Statistics per label: ``loss``;
    ``accuracy`` (a logit of 0 is wrong); ``right_score`` and ``wrong_score``, mean probabilities where labels are above
    and below 1/2.
    """
    known = labels >= 0.0
    logits, labels = logits[known], labels[known].to(logits.dtype)
    total = functional.binary_cross_entropy_with_logits(logits, labels, reduction="sum")
    detached, count = logits.detach(), float(len(labels))
    right, wrong = labels > 0.5, labels < 0.5
    stats: Monitors = {
        "loss": (total.detach(), count),
        "accuracy": (((labels - 0.5) * detached > 0).sum(), count),
        "right_score": (detached.sigmoid()[right].sum(), right.sum()),
        "wrong_score": (detached.sigmoid()[wrong].sum(), wrong.sum()),
    }
    return Loss(total, stats)
