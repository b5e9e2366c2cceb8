"""Rewards from scores, and the selection of the responses to train on."""

from collections.abc import Sequence
from itertools import groupby, islice

from torch import Tensor

from realhf.algorithms.policy_gradient.advantages import equal_in_group
from realhf.algorithms.policy_gradient.config import PPOConfig
from realhf.algorithms.stats import mean_of
from realhf.api.batch_meta import RowId
from realhf.api.messages import Stats
from realhf.data.batch import SequenceBatch


def rewards_of(batch: SequenceBatch, scores: Tensor, config: PPOConfig) -> tuple[SequenceBatch, Stats]:
    """Return the selected rows with ``rewards = (score - reward_output_bias) * reward_output_scaling`` (float32).

    ``scores`` is ``[B]``. Drops responses without a finite reward. Keeps the ``group_size`` best responses per prompt,
    then, with dynamic_sampling, prompts with different rewards. The statistic ``reward`` covers all responses with a
    reward, as does ``reward_sq``, their squares; ``failed`` is the fraction of those without.
    """
    rewards = ((scores - config.reward_output_bias) * config.reward_output_scaling).float()
    finite = rewards.isfinite()
    stats = {"reward": mean_of(rewards, finite), "reward_sq": mean_of(rewards.double() ** 2, finite)}
    stats["failed"] = mean_of(~finite)
    result = SequenceBatch(batch.ids).with_scalars("rewards", rewards).select(finite.nonzero().flatten().tolist())
    if config.generation_size is not None and config.generation_size > config.group_size:
        length_of = dict(zip(batch.ids, batch.columns["prompt_mask"].rows(), strict=True))
        lengths = [int((length_of[row] == 0).sum()) for row in result.ids]
        result = result.select(best_rows(result.ids, result["rewards"].tolist(), lengths, config.group_size))
    if config.dynamic_sampling:
        is_equal = equal_in_group(result["rewards"], [row.prompt for row in result.ids])
        result = result.select([i for i, equal in enumerate(is_equal) if not equal])
    return result, stats


def best_rows(ids: Sequence[RowId], rewards: Sequence[float], response_lengths: Sequence[int], n: int) -> list[int]:
    """Return the indices, ascending, of the ``n`` rows per prompt that are largest by (reward, response length).

    Ties are broken by sample number, so the result does not depend on the order of the batch.
    """
    ranked = sorted(range(len(ids)), key=lambda i: (ids[i].prompt, -rewards[i], -response_lengths[i], ids[i].sample))
    prompts = groupby(ranked, key=lambda i: ids[i].prompt)
    return sorted(i for _, rows in prompts for i in islice(rows, n))
