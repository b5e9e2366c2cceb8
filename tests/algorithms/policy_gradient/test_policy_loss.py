"""Losses of the policy against plain numbers, and how tokens are averaged."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from realhf.algorithms.policy_gradient.policy_loss import (
    actor_loss,
    clipped,
    clipped_weights,
    denominator,
    early_stop_limits,
    reinforce,
    sequence_clipped,
    token_weights,
    truncated_is_weights,
)
from realhf.api.batch_meta import RowId
from realhf.api.config import KLEstimator, KLPlace, LossAggregation, PolicyLoss, PPOConfig
from realhf.data.batch import Column, SequenceBatch
from realhf.ops.rows import PackedRows

small = st.floats(-3, 3)


def batch_of(old: Tensor, advantages: Tensor, mask: Tensor, lengths: tuple[int, ...], **more: Tensor) -> SequenceBatch:
    ids = tuple(RowId(i, 0) for i in range(len(lengths)))
    columns = {"tokens": torch.zeros(len(old)), "logprobs": old, "advantages": advantages, "loss_mask": mask,
               "weights": mask.to(old.dtype), **more}  # fmt: skip
    return SequenceBatch(ids, {key: Column(data, lengths) for key, data in columns.items()})


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(small, small, small, st.booleans()), min_size=1, max_size=12), st.floats(0.05, 0.5))
def test_the_clipped_loss_and_its_gradient(rows: list[tuple[float, float, float, bool]], eps: float) -> None:
    new, old, advantages = (torch.tensor([r[i] for r in rows], dtype=torch.float64) for i in range(3))
    mask = torch.tensor([r[3] for r in rows])
    new.requires_grad_()
    config = PPOConfig(eps_clip=eps, eps_clip_high=2 * eps)
    loss = actor_loss(new, batch_of(old, advantages, mask, (len(rows),)), config)
    want = {"actor_loss": 0.0, "importance_ratio": 0.0, "clip_fraction": 0.0, "approx_kl": 0.0}
    gradient = []
    for n, o, a, m in rows:
        r = math.exp(n - o)
        plain, held = -a * r, -a * min(max(r, 1 - eps), 1 + 2 * eps)
        want["actor_loss"] += m * max(plain, held)
        want["importance_ratio"] += m * r
        want["clip_fraction"] += m * (held > plain)
        want["approx_kl"] += m * (r - 1 - (n - o))
        gradient.append(0.0 if not m or held > plain else -a * r)
    for name, value in want.items():
        assert float(loss.stats[name][0]) == pytest.approx(value, abs=1e-6)
        assert loss.stats[name][1] == mask.sum()
    (got,) = torch.autograd.grad(loss.total, new)
    ratios = [math.exp(n - o) for n, o, _, _ in rows]
    away = [min(abs(r - 1 + eps), abs(r - 1 - 2 * eps)) > 1e-9 for r in ratios]  # off the kinks
    assert [g for g, ok in zip(got.tolist(), away, strict=True) if ok] == pytest.approx(
        [g for g, ok in zip(gradient, away, strict=True) if ok], abs=1e-9
    )


@pytest.mark.parametrize("kind", PolicyLoss)
def test_losses_stay_finite_where_masked_or_far_away(kind: PolicyLoss) -> None:
    new = torch.tensor([0.0, float("nan"), 500.0], requires_grad=True)
    batch = batch_of(torch.tensor([0.0, 0.0, -500.0]), torch.tensor([1.0, 1.0, -1.0]), torch.tensor([1, 0, 1]), (3,))
    loss = actor_loss(new, batch, PPOConfig(policy_loss=kind))
    assert torch.isfinite(loss.total) and torch.isfinite(torch.autograd.grad(loss.total, new)[0]).all()


def test_gspo_has_one_ratio_per_answer() -> None:
    log_ratio = torch.tensor([9.0, 0.1, 0.3, 9.0, -0.2]).requires_grad_()
    rows = PackedRows(torch.tensor([False, True, True, False, True]), (3, 2))
    terms = sequence_clipped(log_ratio, torch.ones(5), rows, 0.1, 0.15)
    first, second = math.exp(0.2), math.exp(-0.2)
    assert terms.loss[[1, 2, 4]].tolist() == pytest.approx([-1.15, -1.15, -second])  # min of r and its clip: A is 1
    assert first > 1.15 and terms.is_clipped[[1, 2, 4]].tolist() == [True, True, False]
    gradient = torch.autograd.grad(terms.loss[4], log_ratio)[0]
    assert gradient.tolist() == pytest.approx([0, 0, 0, 0, -second])


def test_cispo_keeps_the_gradient_of_clipped_tokens_and_reinforce_knows_no_ratio() -> None:
    new = torch.tensor([-1.0, -2.0], requires_grad=True)
    log_ratio, advantages = new - torch.tensor([-2.0, -2.0]), torch.tensor([1.0, -3.0])
    terms = clipped_weights(new, log_ratio, advantages, 0.2, 0.3)
    assert torch.autograd.grad(terms.loss.sum(), new)[0].tolist() == pytest.approx([-1.3, 3.0])
    plain = reinforce(new, advantages)
    assert torch.autograd.grad(plain.loss.sum(), new)[0].tolist() == [-1.0, 3.0]
    assert clipped(torch.tensor([0.5]), torch.tensor([1.0]), 0.2, 0.28).loss.tolist() == pytest.approx([-1.28])


@pytest.mark.parametrize(
    ("mean", "want"),
    [(LossAggregation.token_mean, (2 + 4 + 9) / 3), (LossAggregation.seq_mean, ((2 + 4) / 2 + 9) / 2),
     (LossAggregation.seq_sum, (2 + 4 + 9) / 2), (LossAggregation.constant, (2 + 4 + 9) / 5 / 2)],
)  # fmt: skip
def test_how_tokens_are_averaged(mean: LossAggregation, want: float) -> None:
    values = torch.tensor([7.0, 2.0, 4.0, 9.0, 7.0])  # two answers of two and one tokens, one of none
    rows = PackedRows(torch.tensor([False, True, True, True, False]), (3, 1, 1))
    assert float((values * token_weights(rows, mean, 5.0)).sum()) / denominator(rows, mean) == pytest.approx(want)


def test_the_kl_in_the_loss_has_a_weight_of_its_own() -> None:
    new, ref, mask = torch.tensor([-1.0, -2.0], requires_grad=True), torch.tensor([-2.0, -9.0]), torch.tensor([1, 1])
    weights = torch.tensor([0.5, 2.0])
    config = PPOConfig(kl_in=KLPlace.loss, kl_loss_estimator=KLEstimator.k2, kl_loss_clip=10.0)
    batch = batch_of(new.detach(), torch.zeros(2), mask, (2,), ref_logprobs=ref, kl_weights=weights)
    loss = actor_loss(new, batch, config, kl_coef=0.1)
    assert loss.total.item() == pytest.approx(0.1 * (0.5 * 0.5 + 2.0 * 10.0))  # 24.5 is held at 10
    assert torch.autograd.grad(loss.total, new)[0].tolist() == pytest.approx([0.1 * 0.5 * 1.0, 0.0])
    assert loss.stats["kl_loss"] == (pytest.approx(10.5), 2)


def test_weights_against_the_generator_are_capped_and_scale_the_loss() -> None:
    prox, behaviour = torch.tensor([-1.0, -1.0, -1.0]), torch.tensor([-1.5, -3.0, -9.0])
    weights = truncated_is_weights(prox, behaviour, torch.tensor([True, True, False]), 2.0)
    assert weights.tolist() == pytest.approx([math.exp(0.5), 2.0, 1.0])
    batch = batch_of(prox, torch.ones(3), torch.tensor([1, 1, 0]), (3,), is_weights=weights)
    assert float(actor_loss(prox, batch, PPOConfig()).total) == pytest.approx(-math.exp(0.5) - 2.0)


def test_early_stop_limits_are_those_that_are_set() -> None:
    assert early_stop_limits(PPOConfig()) == {"importance_ratio": 5.0}
    both = PPOConfig(early_stop_imp_ratio=None, early_stop_kl=0.1)
    assert early_stop_limits(both) == {"approx_kl": 0.1}
