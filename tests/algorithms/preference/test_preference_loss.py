"""Preference losses against values computed by hand and finite differences."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from realhf.algorithms.preference.preference_loss import (
    implicit_rewards,
    kl_reference,
    kto_loss,
    kto_losses,
    log_odds,
    pair_loss,
    pair_losses,
    sequence_sums,
)
from realhf.api.config.preference import DPOConfig, PreferenceLoss
from tests.scaling import examples

PAIRED = [loss for loss in PreferenceLoss if loss is not PreferenceLoss.kto]
POLICY = torch.tensor([[-10.0, -12.0], [-20.0, -15.0]], dtype=torch.float64)
REF = torch.tensor([[-11.0, -11.5], [-18.0, -16.0]], dtype=torch.float64)
N_TOKENS = torch.tensor([[5.0, 6.0], [10.0, 5.0]], dtype=torch.float64)
H = (1.5, -3.0)  # (policy - ref) of the chosen response minus that of the rejected one


def nll(x):
    return math.log(1 + math.exp(-x))


def losses(name, policy=POLICY, ref=REF, **options):
    return pair_losses(policy, ref, N_TOKENS, DPOConfig(loss=PreferenceLoss[name], **options)).tolist()


def test_dpo_by_hand():
    assert losses("sigmoid", beta=0.5) == pytest.approx([nll(0.75), nll(-1.5)])
    smooth = [0.8 * nll(x) + 0.2 * nll(-x) for x in (0.75, -1.5)]
    assert losses("sigmoid", beta=0.5, label_smoothing=0.2) == pytest.approx(smooth)


def test_dpo_positive_penalises_a_chosen_response_below_the_reference():
    """Only the chosen response of the second pair is below the reference, by 2 nats."""
    want = [nll(0.5 * 1.5), nll(0.5 * (-3.0 - 4.0 * 2.0))]
    assert losses("positive", beta=0.5, positive_lambda=4.0) == pytest.approx(want)
    assert losses("positive", beta=0.5, positive_lambda=0.0) == pytest.approx(losses("sigmoid", beta=0.5))


def test_ipo_by_hand():
    assert losses("ipo", beta=0.5) == pytest.approx([(1.5 - 1) ** 2, (-3.0 - 1) ** 2])


def test_orpo_by_hand():
    """Means per token -2, -2 and -2, -3; odds p / (1 - p)."""
    odds = [math.exp(m) / (1 - math.exp(m)) for m in (-2.0, -3.0)]
    want = [2.0 + 0.5 * math.log(2), 2.0 + 0.5 * nll(math.log(odds[0] / odds[1]))]
    assert losses("orpo", ref=None, beta=0.5) == pytest.approx(want)


def test_simpo_by_hand():
    assert losses("simpo", ref=None, beta=2.0, simpo_gamma=0.5) == pytest.approx([nll(-0.5), nll(2.0 - 0.5)])


@pytest.mark.parametrize("name", ["sigmoid", "positive"])
def test_loss_is_log_2_if_policy_and_reference_are_equal(name):
    assert losses(name, ref=POLICY) == pytest.approx([math.log(2)] * 2)


@settings(max_examples=examples(40))
@given(
    st.sampled_from(PAIRED),
    st.lists(st.floats(-30, -1), min_size=8, max_size=8),
    st.floats(0.05, 1.0),
    st.floats(0.0, 0.4),
)
def test_gradients_against_finite_differences(loss, numbers, beta, smoothing):
    x = torch.tensor(numbers, dtype=torch.float64).view(2, 2, 2)
    x[1, :, 0] += (x[1, :, 0] - x[0, :, 0]).abs() < 1e-3  # away from the kink of DPO-Positive
    config = DPOConfig(loss=loss, beta=beta, label_smoothing=smoothing, positive_lambda=3.0)
    policy, ref = x[0].clone().requires_grad_(), x[1] if loss.needs_ref else None
    assert torch.autograd.gradcheck(lambda p: pair_losses(p, ref, N_TOKENS, config).sum(), (policy,), eps=1e-5)


def test_the_gradient_of_dpo_is_beta_times_sigmoid():
    policy = POLICY.clone().requires_grad_()
    pair_loss(policy, REF, N_TOKENS, DPOConfig(beta=0.5)).total.backward()
    slopes = [0.5 / (1 + math.exp(0.5 * h)) for h in H]
    assert policy.grad.tolist() == [pytest.approx([-s, s]) for s in slopes]


@pytest.mark.parametrize("loss", PAIRED)
def test_losses_of_extreme_pairs_are_finite(loss):
    policy = torch.tensor([[-5000.0, -1e-9], [-1e-9, -5000.0]], requires_grad=True)
    ref = torch.tensor([[-10.0, -10.0]] * 2) if loss.needs_ref else None
    total = pair_losses(policy, ref, torch.ones(2, 2), DPOConfig(loss=loss)).sum()
    total.backward()
    assert total.isfinite() and policy.grad.isfinite().all()


def test_log_odds():
    assert log_odds(torch.tensor(-math.log(2.0))).item() == pytest.approx(0.0, abs=1e-6)
    assert log_odds(torch.tensor([0.0, -200.0], dtype=torch.float64)).tolist() == pytest.approx([13.8155, -200.0], 1e-5)


def test_pair_statistics():
    stats = pair_loss(POLICY, REF, N_TOKENS, DPOConfig(beta=0.5)).stats
    values = {name: (float(value), float(count)) for name, (value, count) in stats.items()}
    assert values.pop("loss") == pytest.approx((nll(0.75) + nll(-1.5), 2))
    assert values == {"accuracy": (1, 2), "margin": (-0.75, 2), "chosen_reward": (-0.5, 2),
                      "rejected_reward": (0.25, 2), "kl": (-0.5, 4)}  # fmt: skip
    free = pair_loss(POLICY, None, N_TOKENS, DPOConfig(loss=PreferenceLoss.simpo, beta=2.0)).stats
    assert "kl" not in free and [float(x) for x in free["chosen_reward"]] == [-8.0, 2.0]
    tied = pair_loss(POLICY, POLICY, N_TOKENS, DPOConfig()).stats
    assert [float(x) for x in tied["accuracy"]] == [0, 2]  # equal rewards are wrong


def test_kto_by_hand():
    """Rewards 0.5 and -1, reference point 0.2 nats, weights 3 (desirable) and 2."""
    policy = torch.tensor([-10.0, -20.0], dtype=torch.float64)
    ref = torch.tensor([-11.0, -18.0], dtype=torch.float64)
    config = DPOConfig(loss=PreferenceLoss.kto, beta=0.5, desirable_weight=3.0, undesirable_weight=2.0)

    def sigmoid(x):
        return 1 / (1 + math.exp(-x))

    is_good = torch.tensor([True, False])
    want = [3 * (1 - sigmoid(0.5 - 0.1)), 2 * (1 - sigmoid(0.1 + 1.0))]
    assert kto_losses(policy, ref, is_good, 0.2, config).tolist() == pytest.approx(want)
    stats = kto_loss(policy, ref, is_good, 0.2, config).stats
    values = {name: (float(value), float(count)) for name, (value, count) in stats.items()}
    assert (
        values["accuracy"] == (2, 2) and values["chosen_reward"] == (0.5, 1) and values["rejected_reward"] == (-1.0, 1)
    )
    assert values["loss"] == pytest.approx((sum(want), 2)) and values["kl"] == (-1.0, 2)
    swapped = kto_losses(policy, ref, ~is_good, 0.2, config).tolist()
    assert swapped == pytest.approx([2 * sigmoid(0.5 - 0.1), 3 * sigmoid(0.1 + 1.0)])
    with pytest.raises(ValueError, match="single responses"):
        pair_losses(POLICY, REF, N_TOKENS, config)


def test_kto_loss_is_half_if_policy_and_reference_are_equal():
    config = DPOConfig(loss=PreferenceLoss.kto)
    assert kto_losses(POLICY[0], POLICY[0], torch.tensor([True, False]), 0.0, config).tolist() == [0.5, 0.5]


def test_kto_reference_point_is_not_negative():
    assert kl_reference(torch.tensor([6.0, 4.0])) == 1.5
    assert kl_reference(torch.tensor([-6.0, 4.0])) == kl_reference(torch.zeros(2)) == 0.0


@given(st.lists(st.lists(st.tuples(st.floats(-5, 5), st.booleans()), min_size=1, max_size=5), max_size=4))
def test_sums_of_sequences(rows):
    x = torch.tensor([value for row in rows for value, _ in row], dtype=torch.float64)
    mask = torch.tensor([m for row in rows for _, m in row], dtype=torch.bool)
    want = [sum(value for value, m in row if m) for row in rows]
    assert sequence_sums(x, mask, tuple(map(len, rows))).tolist() == pytest.approx(want)


def test_rewards_are_linear_in_beta():
    rewards = [implicit_rewards(POLICY, REF, N_TOKENS, DPOConfig(beta=b)) for b in (0.1, 0.3)]
    assert torch.allclose(3 * rewards[0], rewards[1])
