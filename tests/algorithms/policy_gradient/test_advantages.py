"""Advantages without a critic against their definitions."""

from statistics import mean, pstdev, stdev

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from realhf.algorithms.policy_gradient.advantages import (
    equal_in_group,
    group_advantages,
    leave_one_out,
    overlong_penalties,
    process_advantages,
    whiten,
)
from realhf.api.config import GroupStd
from realhf.ops.masked import masked_sums

scored = st.lists(st.tuples(st.integers(0, 3), st.floats(-2, 2, width=32)), max_size=14)


@settings(max_examples=60, deadline=None)
@given(scored, st.sampled_from(GroupStd))
def test_groups_are_normalised_wherever_their_rows_stand(rows: list[tuple[int, float]], std: GroupStd) -> None:
    groups, scores = [g for g, _ in rows], torch.tensor([s for _, s in rows], dtype=torch.float64)
    found = group_advantages(scores, groups, std).tolist()
    left_out = leave_one_out(scores, groups).tolist()
    for i, (group, score) in enumerate(rows):
        own = [s for g, s in rows if g == group]
        others = [s for j, (g, s) in enumerate(rows) if g == group and j != i]
        same = min(own) == max(own)
        assert bool(equal_in_group(scores, groups)[i]) is same
        if same:
            assert found[i] == 0.0
        else:
            by = {GroupStd.population: pstdev, GroupStd.sample: stdev}.get(std)
            scale = by(own) + 1e-5 if by else 1.0
            assert found[i] == pytest.approx((score - mean(own)) / scale, abs=1e-6)
        assert left_out[i] == pytest.approx(score - mean(others) if others else 0.0, abs=1e-9)


def test_a_known_group() -> None:
    scores = torch.tensor([1.0, 0.0, 0.0, 0.0, 5.0])
    assert group_advantages(scores, [7, 7, 7, 7, 2], GroupStd.none).tolist() == [0.75, -0.25, -0.25, -0.25, 0.0]
    assert group_advantages(scores, [7, 7, 7, 7, 2], GroupStd.sample).tolist() == pytest.approx(
        [1.49997, -0.49999, -0.49999, -0.49999, 0.0], abs=1e-5
    )
    assert leave_one_out(scores, [7, 7, 7, 7, 2]).tolist() == pytest.approx([1.0, -1 / 3, -1 / 3, -1 / 3, 0.0])


def test_rewards_of_steps_add_up_from_their_ends_on() -> None:
    # two answers to a prompt: steps of rewards 1 and 0, and one step of reward 1; then another prompt's only step
    rewards = torch.tensor([9.0, 1.0, 9.0, 0.0, 9.0, 1.0, 4.0])
    ends = torch.tensor([0, 1, 0, 1, 0, 1, 1])
    mean_, std = 2 / 3, pstdev([1, 0, 1]) + 1e-5
    one, zero = (1 - mean_) / std, (0 - mean_) / std
    found = process_advantages(rewards, ends, [4, 2, 1], [0, 0, 1]).tolist()
    assert found == pytest.approx([one + zero, one + zero, zero, zero, one, one, 0.0], abs=1e-6)
    assert process_advantages(torch.empty(0), torch.empty(0), [], []).tolist() == []


def test_whitening_is_with_the_unbiased_variance_inside_the_root() -> None:
    x, mask = torch.tensor([1.0, 2.0, 4.0, 100.0]), torch.tensor([1, 1, 1, 0])
    found = whiten(x, mask, masked_sums(x, mask))
    m, s = 7 / 3, (stdev([1.0, 2.0, 4.0]) ** 2 + 1e-8) ** 0.5
    assert found.tolist() == pytest.approx([(1 - m) / s, (2 - m) / s, (4 - m) / s, 0.0])
    same = torch.full((3,), 5.0)
    assert whiten(same, torch.ones(3), masked_sums(same, torch.ones(3))).tolist() == pytest.approx([0.0] * 3, abs=1e-6)


def test_answers_near_the_limit_lose_more_and_more() -> None:
    lengths = torch.tensor([10, 60, 70, 80])
    assert overlong_penalties(lengths, 80, 20, 0.5).tolist() == [0.0, 0.0, -0.25, -0.5]
