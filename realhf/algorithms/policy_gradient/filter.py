"""Which answers are trained on: the best of each prompt (generation_size), of prompts that tell (dynamic_sampling)."""

from collections.abc import Sequence

from torch import Tensor

from realhf.algorithms.policy_gradient.advantages import equal_in_group
from realhf.api.batch_meta import RowId
from realhf.api.config import PPOConfig
from realhf.data.batch import SequenceBatch


def best_rows(ids: Sequence[RowId], rewards: Sequence[float], answer_lengths: Sequence[int], keep: int) -> list[int]:
    """Return the indices, ascending, of the ``keep`` rows of every prompt that are largest by (reward, answer length).

    Of equal rows the lower sample numbers stay, so the order of the batch does not matter.
    """
    prompts: dict[int, list[int]] = {}
    for i, row in enumerate(ids):
        prompts.setdefault(row.prompt, []).append(i)
    chosen: list[int] = []
    for rows in prompts.values():
        chosen += sorted(rows, key=lambda i: (-rewards[i], -answer_lengths[i], ids[i].sample))[:keep]
    return sorted(chosen)


def answer_lengths(batch: SequenceBatch) -> list[int]:
    """Number of answer tokens of every row, from column ``prompt_mask``."""
    return [int((row == 0).sum()) for row in batch.columns["prompt_mask"].rows()]


def attach_rewards_and_filter(batch: SequenceBatch, rewards: Tensor, config: PPOConfig) -> SequenceBatch:
    """Return the rows that stay, with the scalar column ``rewards`` (``[B]`` float32, one per row of ``batch``)."""
    result = SequenceBatch(batch.ids).with_scalars("rewards", rewards.float())
    if config.generation_size is not None and config.generation_size > config.group_size:
        kept = best_rows(batch.ids, rewards.tolist(), answer_lengths(batch), config.group_size)
        result = result.select(kept)
    if config.dynamic_sampling:
        same = equal_in_group(result["rewards"], [row.prompt for row in result.ids]).tolist()
        result = result.select([i for i, is_same in enumerate(same) if not is_same])
    return result
