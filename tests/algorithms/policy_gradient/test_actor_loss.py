"""The actor loss against loops over tokens, and its aggregation."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from realhf.algorithms.policy_gradient.config import PPOConfig
from realhf.algorithms.policy_gradient.losses.actor_loss import (
    actor_loss,
    denominator,
    mismatch_of,
    token_weights,
)
from realhf.algorithms.policy_gradient.losses.corrections import CORRECTIONS
from realhf.api.batch_meta import RowId
from realhf.api.config import KLEstimator, KLPlace, LossAggregation
from realhf.data.batch import Column, SequenceBatch
from realhf.ops.rows import PackedRows
from tests.scaling import examples

small = st.floats(-3, 3)


def batch_of(old: Tensor, advantages: Tensor, mask: Tensor, lengths: tuple[int, ...], **more: Tensor) -> SequenceBatch:
    ids = tuple(RowId(i, 0) for i in range(len(lengths)))
    columns = {"tokens": torch.zeros(len(old)), "logprobs": old, "advantages": advantages, "loss_mask": mask,
               "weights": mask.to(old.dtype), **more}  # fmt: skip
    return SequenceBatch(ids, {key: Column(data, lengths) for key, data in columns.items()})


@settings(max_examples=examples(50))
@given(st.lists(st.tuples(small, small, small, st.booleans()), min_size=1, max_size=12), st.floats(0.05, 0.5))
def test_clipped_loss_and_gradient(rows: list[tuple[float, float, float, bool]], eps: float) -> None:
    new, old, advantages = (torch.tensor([r[i] for r in rows], dtype=torch.float64) for i in range(3))
    mask = torch.tensor([r[3] for r in rows])
    new.requires_grad_()
    config = PPOConfig(eps_clip=eps, eps_clip_high=2 * eps)
    loss = actor_loss(new, batch_of(old, advantages, mask, (len(rows),)), config)
    want = {"actor_loss": 0.0, "importance_ratio": 0.0, "clip_fraction": 0.0, "approx_kl": 0.0}
    gradient = []
    for n, o, a, m in rows:
        r = math.exp(n - o)
        plain, clipped = -a * r, -a * min(max(r, 1 - eps), 1 + 2 * eps)
        want["actor_loss"] += m * max(plain, clipped)
        want["importance_ratio"] += m * r
        want["clip_fraction"] += m * (clipped > plain)
        want["approx_kl"] += m * (r - 1 - (n - o))
        gradient.append(0.0 if not m or clipped > plain else -a * r)
    for name, value in want.items():
        assert float(loss.stats[name][0]) == pytest.approx(value, abs=1e-6)
        assert loss.stats[name][1] == mask.sum()
    (got,) = torch.autograd.grad(loss.total, new)
    ratios = [math.exp(n - o) for n, o, _, _ in rows]
    smooth = [min(abs(r - 1 + eps), abs(r - 1 - 2 * eps)) > 1e-9 for r in ratios]  # away from the kinks
    assert [g for g, ok in zip(got.tolist(), smooth, strict=True) if ok] == pytest.approx(
        [g for g, ok in zip(gradient, smooth, strict=True) if ok], abs=1e-9
    )


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [(LossAggregation.token_mean, (2 + 4 + 9) / 3), (LossAggregation.seq_mean, ((2 + 4) / 2 + 9) / 2),
     (LossAggregation.seq_sum, (2 + 4 + 9) / 2), (LossAggregation.constant, (2 + 4 + 9) / 5 / 2)],
)  # fmt: skip
def test_aggregation(aggregation: LossAggregation, expected: float) -> None:
    values = torch.tensor([7.0, 2.0, 4.0, 9.0, 7.0])  # responses of 2, 1 and 0 tokens
    rows = PackedRows(torch.tensor([False, True, True, True, False]), (3, 1, 1))
    total = float((values * token_weights(rows, aggregation, 5.0)).sum())
    assert total / denominator(rows, aggregation) == pytest.approx(expected)


def test_the_kl_loss_has_its_own_weights() -> None:
    new, ref, mask = torch.tensor([-1.0, -2.0], requires_grad=True), torch.tensor([-2.0, -9.0]), torch.tensor([1, 1])
    weights = torch.tensor([0.5, 2.0])
    config = PPOConfig(kl_in=KLPlace.loss, kl_loss_estimator=KLEstimator.k2, kl_loss_clip=10.0)
    batch = batch_of(new.detach(), torch.zeros(2), mask, (2,), ref_logprobs=ref, kl_weights=weights)
    loss = actor_loss(new, batch, config, kl_coef=0.1)
    assert loss.total.item() == pytest.approx(0.1 * (0.5 * 0.5 + 2.0 * 10.0))  # 24.5 is clamped to 10
    assert torch.autograd.grad(loss.total, new)[0].tolist() == pytest.approx([0.1 * 0.5 * 1.0, 0.0])
    assert loss.stats["kl_loss"] == (pytest.approx(10.5), 2)


def test_importance_weights_are_capped_and_scale_the_loss() -> None:
    prox, behaviour = torch.tensor([-1.0, -1.0, -1.0]), torch.tensor([-1.5, -3.0, -9.0])
    rows = PackedRows(torch.tensor([True, True, False]), (3,))
    weights = CORRECTIONS["tis"].fn(mismatch_of(prox, behaviour, rows, 2.0), None).weights
    assert weights.tolist() == pytest.approx([math.exp(0.5), 2.0, 1.0])
    batch = batch_of(prox, torch.ones(3), torch.tensor([1, 1, 0]), (3,), is_weights=weights)
    assert float(actor_loss(prox, batch, PPOConfig()).total) == pytest.approx(-math.exp(0.5) - 2.0)
