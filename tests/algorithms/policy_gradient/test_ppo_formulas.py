"""The formulas of PPO against plain numbers."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from realhf.algorithms.policy_gradient.ppo_formulas import (
    ValueNorm,
    answer_mask,
    critic_loss,
    loss_mask,
    to_states,
    token_rewards,
)
from realhf.api.config import PPOConfig, ValueNormType
from realhf.ops.masked import masked_sums

small = st.floats(-3, 3)


def test_answers_are_what_follows_the_prompt_but_never_a_first_token():
    mask = torch.tensor([1, 1, 0, 0, 0, 0], dtype=torch.uint8)
    assert answer_mask(mask, (4, 2)).tolist() == [False, False, True, True, False, True]
    assert answer_mask(mask[:0], ()).tolist() == []


def test_truncated_rows_leave_the_loss_on_request():
    answers, truncated = torch.tensor([False, True, False, True]), torch.tensor([1, 0], dtype=torch.uint8)
    assert loss_mask(answers, truncated, (2, 2), False).tolist() == [False, True, False, True]
    assert loss_mask(answers, truncated, (2, 2), True).tolist() == [False, False, False, True]


@pytest.mark.parametrize(("zero", "score"), [(False, 2.0), (True, 0.0)])
def test_rewards_are_the_penalty_and_the_clipped_score_at_the_end(zero, score):
    config = PPOConfig(max_reward_clip=2.0, mask_no_eos_with_zero=zero)
    kl = torch.tensor([0.0, 0, 3, -1, 0, 5])
    rewards = token_rewards(kl, torch.tensor([7.0, -7.0]), torch.tensor([1, 0], dtype=torch.uint8), (4, 2), 0.5, config)
    assert rewards.tolist() == [0, 0, -1.5, 0.5 + score, 0, -4.5]


def test_actions_move_to_the_state_they_were_chosen_in():
    assert to_states(torch.tensor([0.0, 1, 2, 0, 3])).tolist() == [1, 2, 0, 3, 0]


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.tuples(st.floats(-30, 30), small, small, st.booleans()), min_size=1, max_size=12),
    st.sampled_from(["mse", "huber"]),
)
def test_critic_loss(rows, kind):
    def error(e):
        return 0.5 * e * e if kind == "mse" or abs(e) < 10 else 10 * (abs(e) - 5)

    columns = [torch.tensor([r[i] for r in rows], dtype=torch.float64) for i in range(3)]
    loss = critic_loss(*columns, torch.tensor([r[3] for r in rows]), PPOConfig(value_loss_type=kind))
    want = sum(m * max(error(v - t), error(min(max(v, o - 0.2), o + 0.2) - t)) for v, o, t, m in rows)
    assert loss.total.item() == pytest.approx(want, abs=1e-9)
    assert loss.stats["value_clip_ratio"][1] == sum(r[3] for r in rows)


def test_critic_gradient():
    old, target = torch.zeros(3, dtype=torch.float64), torch.tensor([1.0, 1.0, 1.0], dtype=torch.float64)
    values = torch.tensor([0.1, 0.9, -0.5], dtype=torch.float64, requires_grad=True)  # free, held back, moved away
    loss = critic_loss(values, old, target, torch.ones(3), PPOConfig())
    assert torch.autograd.grad(loss.total, values)[0].tolist() == pytest.approx([-0.9, 0.0, -1.5])
    assert loss.stats["value_clip_ratio"][0] == 1


def test_value_norm_before_and_after_the_first_returns():
    fresh = ValueNorm.load(PPOConfig(), {})
    assert fresh.mean == 0 and fresh.std == pytest.approx(0.1)
    x = torch.tensor([1.0, 2.0, 6.0], dtype=torch.float64)
    norm = fresh.update(masked_sums(x, torch.ones(3)))
    assert norm.mean == pytest.approx(3.0) and norm.std == pytest.approx(math.sqrt(14 / 3))  # undone start at 0
    assert fresh.update(torch.zeros(3)) == fresh and fresh.weight == 0


def test_value_norm_forgets_by_beta_or_never():
    first, second = torch.tensor([0.0, 4.0]), torch.tensor([10.0, 10.0, 10.0])
    exp = ValueNorm.load(PPOConfig(value_norm_beta=0.5), {})
    history = ValueNorm.load(PPOConfig(value_norm_type=ValueNormType.ma), {})
    for part in (first, second):
        exp, history = (n.update(masked_sums(part, torch.ones(len(part)))) for n in (exp, history))
    assert exp.mean == pytest.approx((0.25 * 2 + 0.5 * 10) / 0.75)
    assert exp.std**2 == pytest.approx((0.25 * 8 + 0.5 * 100) / 0.75 - exp.mean**2)
    assert history.mean == pytest.approx(34 / 5) and history.std**2 == pytest.approx(316 / 5 - (34 / 5) ** 2)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.floats(-50, 50), min_size=1, max_size=20), st.sampled_from(list(ValueNormType)))
def test_value_norm_there_and_back(xs, kind):
    config = PPOConfig(value_norm_type=kind)
    x = torch.tensor(xs, dtype=torch.float64)
    norm = ValueNorm.load(config, {}).update(masked_sums(x, torch.ones(len(x))))
    assert ValueNorm.load(config, norm.dump()) == norm and all(type(v) is float for v in norm.dump().values())
    assert norm.denormalise(norm.raw(x)).tolist() == pytest.approx(xs, abs=1e-6)
    assert norm.std >= 0.1 - 1e-12 and norm.normalise(x * 1000).abs().max() <= 5
