"""Rewards from scores, and the selection of the responses to train on."""

from collections.abc import Callable, Sequence
from itertools import groupby, islice

from torch import Tensor

from realhf.algorithms.policy_gradient.advantages import episode_numbers, equal_in_group, first_rows
from realhf.algorithms.policy_gradient.config import PPOConfig
from realhf.algorithms.stats import mean_of
from realhf.api.batch_meta import RowId
from realhf.api.curriculum import PromptResult
from realhf.api.messages import Stats
from realhf.data.batch import SequenceBatch

Report = Callable[[Sequence[PromptResult]], None] | None


def rewards_of(
    batch: SequenceBatch,
    scores: Tensor,
    config: PPOConfig,
    report: Report = None,
    is_right: Sequence[bool] = (),
    model_scores: Tensor | None = None,
) -> tuple[SequenceBatch, Stats]:
    """Return the selected rows with ``rewards = (score - reward_output_bias) * reward_output_scaling`` (float32).

    ``scores`` is ``[B]``. ``model_scores``, ``[B]``, are those of a reward model in addition to a verifier: these times
    ``rm_output_scaling`` are added. Drops responses without a finite reward. Keeps the ``group_size`` best responses
    per prompt, then, with dynamic_sampling, prompts with different rewards. The statistic ``reward`` covers all
    responses with a reward, as does ``reward_sq``, their squares; ``failed`` is the fraction of those without. The rows
    of an episode have the same score: they count once, and are kept or dropped together. ``report`` takes the rewards
    of every prompt before the selection, and counts of rows that are ``is_right``, if a verifier decides it.
    """
    rewards = (scores - config.reward_output_bias) * config.reward_output_scaling
    if model_scores is not None:
        rewards = rewards + config.rm_output_scaling * model_scores
    rewards = rewards.float()
    episode_of = episode_numbers(batch)
    firsts = first_rows(episode_of)
    finite = rewards[firsts].isfinite()
    stats = {"reward": mean_of(rewards[firsts], finite), "reward_sq": mean_of(rewards[firsts].double() ** 2, finite)}
    stats["failed"] = mean_of(~finite)
    episodes = [number for number, is_finite in enumerate(finite.tolist()) if is_finite]
    values, ids = rewards.tolist(), [batch.ids[row] for row in firsts]
    if report is not None:
        rows = [firsts[k] for k in episodes]
        report(prompt_results([batch.ids[row].prompt for row in rows], [values[row] for row in rows],
                              [is_right[row] for row in rows] if is_right else None))  # fmt: skip
    if config.generation_size is not None and config.generation_size > config.group_size:
        lengths = response_lengths(batch, episode_of)
        found = [ids[k] for k in episodes], [values[firsts[k]] for k in episodes], [lengths[k] for k in episodes]
        episodes = [episodes[i] for i in best_rows(*found, config.group_size)]
    if config.dynamic_sampling:
        is_equal = equal_in_group(rewards[[firsts[k] for k in episodes]], [ids[k].prompt for k in episodes])
        episodes = [k for k, equal in zip(episodes, is_equal, strict=True) if not equal]
    kept = set(episodes)
    result = SequenceBatch(batch.ids).with_scalars("rewards", rewards)
    return result.select([row for row, number in enumerate(episode_of) if number in kept]), stats


def prompt_results(
    prompts: Sequence[int], rewards: Sequence[float], is_right: Sequence[bool] | None
) -> list[PromptResult]:
    """Return the results of responses by prompt."""
    by_prompt: dict[int, list[int]] = {}
    for i, prompt in enumerate(prompts):
        by_prompt.setdefault(prompt, []).append(i)
    return [
        PromptResult(
            prompt, tuple(rewards[i] for i in rows), None if is_right is None else sum(is_right[i] for i in rows)
        )
        for prompt, rows in by_prompt.items()
    ]


def response_lengths(batch: SequenceBatch, episode_of: Sequence[int]) -> list[int]:
    """Return the number of sampled tokens of each episode."""
    lengths = [0] * (max(episode_of, default=-1) + 1)
    for number, mask in zip(episode_of, batch.columns["prompt_mask"].rows(), strict=True):
        lengths[number] += int((mask == 0).sum())
    return lengths


def best_rows(ids: Sequence[RowId], rewards: Sequence[float], lengths: Sequence[int], n: int) -> list[int]:
    """Return the indices, ascending, of the ``n`` rows per prompt that are largest by (reward, response length).

    Ties are broken by sample number, so the result does not depend on the order of the batch.
    """
    ranked = sorted(range(len(ids)), key=lambda i: (ids[i].prompt, -rewards[i], -lengths[i], ids[i].sample))
    prompts = groupby(ranked, key=lambda i: ids[i].prompt)
    return sorted(i for _, rows in prompts for i in islice(rows, n))
