"""Rewards, and the selection of responses to train on."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from realhf.algorithms.policy_gradient.config import PPOConfig
from realhf.algorithms.policy_gradient.rewards import best_rows, rewards_of
from realhf.api.batch_meta import RowId
from realhf.api.curriculum import PromptResult
from realhf.data.batch import Column, SequenceBatch
from tests.scaling import examples

IDS = tuple(RowId(p, s) for p in (4, 1) for s in range(3))


def test_best_rows_by_reward_then_length_then_sample():
    assert best_rows(IDS, [1, 2, 2, 5, 5, 5], [9, 3, 4, 7, 7, 8], 1) == [2, 5]
    assert best_rows(IDS, [1, 2, 2, 5, 5, 5], [9, 3, 4, 7, 7, 8], 2) == [1, 2, 3, 5]


@settings(max_examples=examples(40))
@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)), min_size=6, max_size=6),
    st.permutations(range(6)),
    st.integers(1, 3),
)
def test_best_rows_do_not_depend_on_the_order_of_the_batch(values, order, keep):
    rewards, lengths = [v[0] for v in values], [v[1] for v in values]
    kept = {IDS[i] for i in best_rows(IDS, rewards, lengths, keep)}
    mixed = best_rows([IDS[i] for i in order], [rewards[i] for i in order], [lengths[i] for i in order], keep)
    assert {IDS[order[i]] for i in mixed} == kept and len(kept) == 2 * keep


def test_selected_rows_keep_their_rewards():
    mask = [torch.tensor([1, 0, 0], dtype=torch.uint8), torch.tensor([1, 0], dtype=torch.uint8)] * 3
    batch = SequenceBatch(IDS, {"prompt_mask": Column.of(mask)})
    rewards = torch.tensor([1.0, 1, 0, 1, 1, 2], dtype=torch.float64)
    best, _ = rewards_of(batch, rewards, PPOConfig(generation_size=3, group_size=1))
    assert best.ids == (RowId(4, 0), RowId(1, 2)) and best["rewards"].tolist() == [1, 2]
    assert best["rewards"].dtype == torch.float32
    assert rewards_of(batch, rewards, PPOConfig(group_size=3))[0].ids == IDS
    assert rewards_of(batch.select([]), rewards[:0], PPOConfig(generation_size=3))[0].ids == ()


def test_rewards_are_scaled_scores_and_the_statistic_covers_all_rows():
    batch = SequenceBatch(IDS[:3], {"prompt_mask": Column.of([torch.zeros(2)] * 3)})
    config = PPOConfig(reward_output_bias=0.5, reward_output_scaling=2.0, generation_size=3, group_size=1)
    best, stats = rewards_of(batch, torch.tensor([1.0, 2.0, 0.0], dtype=torch.float64), config)
    assert best.ids == (RowId(4, 1),) and best["rewards"].tolist() == [3.0] and stats["reward"] == (3.0, 3.0)


@settings(max_examples=examples(60))
@given(st.lists(st.sampled_from([0.0, 1.0, 2.0, float("nan"), float("inf"), 1e39]), min_size=6, max_size=6),
       st.integers(1, 3), st.booleans())  # fmt: skip
def test_selection_is_as_if_responses_without_a_reward_did_not_exist(scores, keep, dynamic):
    config = PPOConfig(generation_size=3, group_size=keep, dynamic_sampling=dynamic)
    mask = Column.of([torch.zeros(2, dtype=torch.uint8)] * 6)
    batch, values = SequenceBatch(IDS, {"prompt_mask": mask}), torch.tensor(scores, dtype=torch.float64)
    kept = [i for i, score in enumerate(scores) if score < 1e38]
    result, stats = rewards_of(batch, values, config)
    alone, alone_stats = rewards_of(batch.select(kept), values[kept], config)
    assert result.ids == alone.ids and torch.equal(result["rewards"], alone["rewards"])
    assert stats == {**alone_stats, "failed": (6.0 - len(kept), 6.0)}


def test_dynamic_sampling_drops_prompts_with_equal_rewards():
    rewards = torch.tensor([1.0, 1.0, 1.0, 0.0, 1.0, 0.0])
    result, _ = rewards_of(SequenceBatch(IDS), rewards, PPOConfig(group_size=3, dynamic_sampling=True))
    assert result.ids == IDS[3:]


def test_results_cover_all_responses_with_a_reward_before_the_selection():
    rewards = torch.tensor([1.0, 1.0, 0.0, float("nan"), 2.0, 2.0])
    config = PPOConfig(generation_size=3, group_size=1, dynamic_sampling=True, reward_output_scaling=2.0)
    mask = Column.of([torch.zeros(2, dtype=torch.uint8)] * 6)
    reports = []
    rewards_of(SequenceBatch(IDS, {"prompt_mask": mask}), rewards, config, reports.append)
    assert reports == [[PromptResult(4, (2.0, 2.0, 0.0)), PromptResult(1, (4.0, 4.0))]]
    right = [True, False, False, True, True, False]
    rewards_of(SequenceBatch(IDS, {"prompt_mask": mask}), rewards, config, reports.append, right)
    assert [result.n_right for result in reports[1]] == [1, 1]
    rewards_of(SequenceBatch(IDS), rewards * float("nan"), PPOConfig(group_size=3), reports.append)
    assert reports[2] == [], "a prompt without rewards has no result"
    episode = Column.scalars(torch.tensor([0, 0, 1, 0, 1, 2]))
    rewards_of(
        SequenceBatch(IDS, {"episode": episode}), torch.tensor([1.0, 1, 0, 1, 2, 3]), PPOConfig(), reports.append
    )
    assert reports[3] == [PromptResult(4, (1.0, 0.0)), PromptResult(1, (1.0, 2.0, 3.0))], "an episode counts once"
