"""PPO formulas against plain Python."""

import math
from dataclasses import replace
from statistics import stdev

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from realhf.algorithms.policy_gradient.config import PPOConfig
from realhf.algorithms.policy_gradient.ppo_formulas import (
    ValueNorm,
    critic_loss,
    outcome_rewards,
    response_mask,
    to_states,
    token_rewards,
    whiten,
)
from realhf.api.config import GenerationConfig, ValueLossType, ValueNormType
from realhf.ops.rows import PackedRows, masked_sums
from tests.scaling import examples

small = st.floats(-3, 3)


def test_response_mask_excludes_prompts_and_first_tokens():
    mask = torch.tensor([1, 1, 0, 0, 0, 0], dtype=torch.uint8)
    assert response_mask(mask, (4, 2)).tolist() == [False, False, True, True, False, True]
    assert response_mask(mask[:0], ()).tolist() == []


def test_token_rewards_are_kl_penalties_and_the_outcome():
    kl = torch.tensor([0.0, 0, 3, -1, 0, 5])
    rewards = token_rewards(kl, torch.tensor([2.0, -2.0]), PackedRows(torch.ones(6, dtype=torch.bool), (4, 2)), 0.5)
    assert rewards.tolist() == [0, 0, -1.5, 0.5 + 2.0, 0, -4.5]


def test_whiten_adds_epsilon_to_the_unbiased_variance():
    x, mask = torch.tensor([1.0, 2.0, 4.0, 100.0]), torch.tensor([1, 1, 1, 0])
    m, s = 7 / 3, (stdev([1.0, 2.0, 4.0]) ** 2 + 1e-8) ** 0.5
    assert whiten(x, mask, masked_sums(x, mask)).tolist() == pytest.approx([(1 - m) / s, (2 - m) / s, (4 - m) / s, 0.0])
    equal, ones = torch.full((3,), 5.0), torch.ones(3)
    assert whiten(equal, ones, masked_sums(equal, ones)).tolist() == pytest.approx([0.0] * 3, abs=1e-6)


def test_outcomes_are_clipped_then_masked_then_penalised():
    """The last response is truncated, and right or wrong: the penalty of its length remains."""
    config = PPOConfig(gen=GenerationConfig(max_new_tokens=80), overlong_buffer=20, overlong_penalty=0.5,
                       max_reward_clip=2.0)  # fmt: skip
    lengths, truncated = torch.tensor([10, 60, 70, 80, 80]), torch.tensor([0, 0, 0, 0, 1], dtype=torch.uint8)
    rewards = torch.tensor([7.0, -7.0, 1.0, -1.0, 1.0])
    assert outcome_rewards(rewards, truncated, lengths, config).tolist() == [2.0, -2.0, 0.75, -1.5, 0.5]
    masked = replace(config, mask_no_eos_with_zero=True)
    assert outcome_rewards(rewards, truncated, lengths, masked).tolist() == [2.0, -2.0, 0.75, -1.5, -0.5]


@settings(max_examples=examples(100))
@given(st.integers(1, 50), st.floats(0, 3), st.floats(-25, 25, width=32), st.floats(0, 25, width=32), st.booleans())
def test_a_truncated_response_is_never_worth_more_than_a_finished_one(buffer, penalty, reward, more, zero):
    """The finished one is as long or shorter, and its reward is as high, and at least 0 (see truncation_warnings)."""
    config = PPOConfig(gen=GenerationConfig(max_new_tokens=50), overlong_buffer=buffer, overlong_penalty=penalty,
                       mask_no_eos_with_zero=zero)  # fmt: skip
    finished = max(reward, 0.0) + more if zero else reward + more
    truncated = torch.tensor([1] + [0] * 50, dtype=torch.uint8)
    lengths = torch.tensor([50, *range(1, 51)])
    first, *others = outcome_rewards(torch.tensor([reward] + [finished] * 50), truncated, lengths, config).tolist()
    assert all(first <= other for other in others)


def test_actions_move_to_the_preceding_state():
    assert to_states(torch.tensor([0.0, 1, 2, 0, 3])).tolist() == [1, 2, 0, 3, 0]


@settings(max_examples=examples(50))
@given(
    st.lists(st.tuples(st.floats(-30, 30), small, small, st.booleans()), min_size=1, max_size=12),
    st.sampled_from(ValueLossType),
)
def test_critic_loss(rows, kind):
    def error(e):
        return 0.5 * e * e if kind is ValueLossType.mse or abs(e) < 10 else 10 * (abs(e) - 5)

    columns = [torch.tensor([r[i] for r in rows], dtype=torch.float64) for i in range(3)]
    loss = critic_loss(*columns, torch.tensor([r[3] for r in rows]), PPOConfig(value_loss_type=kind))
    want = sum(m * max(error(v - t), error(min(max(v, o - 0.2), o + 0.2) - t)) for v, o, t, m in rows)
    assert loss.total.item() == pytest.approx(want, abs=1e-9)
    assert loss.stats["value_clip_fraction"][1] == sum(r[3] for r in rows)


def test_critic_gradient():
    old, target = torch.zeros(3, dtype=torch.float64), torch.tensor([1.0, 1.0, 1.0], dtype=torch.float64)
    values = torch.tensor(
        [0.1, 0.9, -0.5], dtype=torch.float64, requires_grad=True
    )  # unclipped, clipped, clipped with gradient
    loss = critic_loss(values, old, target, torch.ones(3), PPOConfig())
    assert torch.autograd.grad(loss.total, values)[0].tolist() == pytest.approx([-0.9, 0.0, -1.5])
    assert loss.stats["value_clip_fraction"][0] == 1


def test_value_norm_before_and_after_the_first_update():
    fresh = ValueNorm(PPOConfig())
    assert fresh.mean == 0 and fresh.std == pytest.approx(0.1)
    x = torch.tensor([1.0, 2.0, 6.0], dtype=torch.float64)
    norm = fresh.update(masked_sums(x, torch.ones(3)))
    assert norm.mean == pytest.approx(3.0) and norm.std == pytest.approx(math.sqrt(14 / 3))  # with bias correction
    assert fresh.update(torch.zeros(3)) == fresh and fresh.weight == 0


def test_value_norm_of_moving_averages_and_of_all_steps():
    first, second = torch.tensor([0.0, 4.0]), torch.tensor([10.0, 10.0, 10.0])
    exp = ValueNorm(PPOConfig(value_norm_beta=0.5))
    history = ValueNorm(PPOConfig(value_norm_type=ValueNormType.ma))
    for part in (first, second):
        exp, history = (n.update(masked_sums(part, torch.ones(len(part)))) for n in (exp, history))
    assert exp.mean == pytest.approx((0.25 * 2 + 0.5 * 10) / 0.75)
    assert exp.std**2 == pytest.approx((0.25 * 8 + 0.5 * 100) / 0.75 - exp.mean**2)
    assert history.mean == pytest.approx(34 / 5) and history.std**2 == pytest.approx(316 / 5 - (34 / 5) ** 2)


@settings(max_examples=examples(40))
@given(st.lists(st.floats(-50, 50), min_size=1, max_size=20), st.sampled_from(list(ValueNormType)))
def test_value_norm_round_trip(xs, kind):
    config = PPOConfig(value_norm_type=kind)
    x = torch.tensor(xs, dtype=torch.float64)
    norm = ValueNorm(config).update(masked_sums(x, torch.ones(len(x))))
    assert ValueNorm(config, **norm.dump()) == norm and all(type(v) is float for v in norm.dump().values())
    assert norm.denormalise(norm.raw(x)).tolist() == pytest.approx(xs, abs=1e-6)
    assert norm.std >= 0.1 - 1e-12 and norm.normalise(x * 1000).abs().max() <= 5
