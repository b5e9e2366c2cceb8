"""Policy losses against values computed by hand."""

import math
from typing import NamedTuple

import pytest
import torch

from realhf.algorithms.policy_gradient.config import PolicyLoss, PPOConfig
from realhf.algorithms.policy_gradient.losses.actor_loss import actor_loss
from realhf.algorithms.policy_gradient.losses.policy_losses import (
    POLICY_LOSSES,
    ClipCovOptions,
    DualClipOptions,
    KLCovOptions,
    PolicyLossInputs,
    SapoOptions,
)
from realhf.api.batch_meta import RowId
from realhf.api.config.option import leaves, range_problems
from realhf.data.batch import Column, SequenceBatch
from realhf.ops.rows import PackedRows

LOGPROBS, RATIOS, ADVANTAGES = (-1.0, -2.0, -1.0), (1.5, 0.9, 0.5), (2.0, 2.0, -1.0)
CLIP_LOW, CLIP_HIGH = 0.2, 0.3
LENGTHS = (3, 2)  # two responses of two tokens and of one token


class Worked(NamedTuple):
    """Per response token: the loss, and the gradient of the sum of losses with respect to its log-probability."""

    loss: tuple[float, float, float]
    gradient: tuple[float, float, float]
    n_clipped: int
    options: object = None


S = (1.5 * 0.9) ** 0.5


def gate(ratio: float, tau: float) -> float:
    return 4 / tau / (1 + math.exp(-tau * (ratio - 1)))


def slope(ratio: float, tau: float) -> float:
    """Of the gate in the log-probability."""
    share = gate(ratio, tau) * tau / 4
    return 4 * share * (1 - share) * ratio


WORKED = {
    "clip": Worked((-2 * 1.3, -2 * 0.9, 0.8), (0.0, -2 * 0.9, 0.0), 2),
    "dual_clip": Worked((-2 * 1.3, -2 * 0.9, 0.4), (0.0, -2 * 0.9, 0.0), 2, DualClipOptions(cap=0.4)),
    "sapo": Worked(
        (-2 * gate(1.5, 1.0), -2 * gate(0.9, 1.0), gate(0.5, 1.05)),
        (-2 * slope(1.5, 1.0), -2 * slope(0.9, 1.0), slope(0.5, 1.05)),
        0,
        SapoOptions(),
    ),
    "sequence_clip": Worked((-2 * S, -2 * S, 0.8), (-2 * S, -2 * S, 0.0), 1),
    "clip_cov": Worked((-2 * 1.3, -2 * 0.9, 0.8), (0.0, 0.0, 0.0), 3, ClipCovOptions()),  # the second token is selected
    "kl_cov": Worked(
        (-2 * 1.5, -2 * 0.9 + 3 * (0.9 - 1 - math.log(0.9)), 0.5),
        (-2 * 1.5, -2 * 0.9 + 3 * (0.9 - 1), 0.5),
        0,
        KLCovOptions(coef=3.0),
    ),
    "cispo": Worked((1.3 * 2, 0.9 * 4, -0.8), (-1.3 * 2, -0.9 * 2, 0.8), 0),
    "reinforce": Worked((2.0, 4.0, -1.0), (-2.0, -2.0, 1.0), 0),
}


def test_every_policy_loss_has_a_worked_case_and_a_source() -> None:
    assert WORKED.keys() == POLICY_LOSSES.keys()
    assert all("arXiv" in loss.doc and "\n" not in loss.doc for loss in POLICY_LOSSES.values())


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_worked_case(name: str) -> None:
    logprobs, ratios, advantages = torch.tensor([LOGPROBS, RATIOS, ADVANTAGES], dtype=torch.float64)
    logprobs.requires_grad_()
    mask = torch.tensor([False, True, True, False, True])

    def packed(values: torch.Tensor) -> torch.Tensor:
        return torch.zeros(5, dtype=torch.float64).masked_scatter(mask, values)

    log_ratio = packed(ratios.log() + logprobs - logprobs.detach())
    rows = PackedRows(mask, LENGTHS)
    selected = torch.tensor([False, False, True, False, False])
    inputs = PolicyLossInputs(packed(logprobs), log_ratio, packed(advantages), rows, CLIP_LOW, CLIP_HIGH, selected)
    terms = POLICY_LOSSES[name].fn(inputs, WORKED[name].options)
    loss = terms.loss[mask]
    assert loss.tolist() == pytest.approx(WORKED[name].loss)
    assert torch.autograd.grad(loss.sum(), logprobs)[0].tolist() == pytest.approx(WORKED[name].gradient)
    assert (0 if terms.is_clipped is None else terms.is_clipped[mask].sum()) == WORKED[name].n_clipped


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_losses_are_finite_at_masked_tokens_and_at_extreme_ratios(name: str) -> None:
    new = torch.tensor([0.0, float("nan"), 500.0], requires_grad=True)
    columns = {
        "tokens": torch.zeros(3),
        "logprobs": torch.tensor([0.0, 0.0, -500.0]),
        "advantages": torch.tensor([1.0, 1.0, -1.0]),
        "loss_mask": torch.tensor([1, 0, 1]),
        "weights": torch.tensor([1.0, 0.0, 1.0]),
        "is_selected": torch.tensor([0, 0, 1]),
    }
    batch = SequenceBatch((RowId(0, 0),), {key: Column(data, (3,)) for key, data in columns.items()})
    loss = actor_loss(new, batch, PPOConfig(policy_loss=PolicyLoss[name]))
    assert torch.isfinite(loss.total) and torch.isfinite(torch.autograd.grad(loss.total, new)[0]).all()


@pytest.mark.parametrize(
    "low, high, is_valid", [(1.0, 5.0, True), (2.0, 2.0, True), (-5.0, -1.0, True), (5.0, 1.0, False)]
)
def test_a_band_of_covariances_is_not_empty(low: float, high: float, is_valid: bool) -> None:
    ppo = PPOConfig(policy_loss=PolicyLoss["clip_cov"])
    ppo.losses.clip_cov.low, ppo.losses.clip_cov.high = low, high
    assert (POLICY_LOSSES["clip_cov"].check(ppo) == []) == is_valid


@pytest.mark.parametrize("cap", [0.01, 0.5, 1.0, 3.0, float("inf")])
def test_a_cap_that_stops_gradients_of_equal_policies_is_refused(cap: float) -> None:
    ppo = PPOConfig(policy_loss=PolicyLoss["dual_clip"])
    ppo.losses.dual_clip.cap = cap
    logprobs = torch.full((3,), -1.0, requires_grad=True)
    rows = PackedRows(torch.tensor([False, True, True]), [3])
    x = PolicyLossInputs(logprobs, logprobs - logprobs.detach(), torch.full((3,), -1.0), rows, 0.2, 0.2)
    POLICY_LOSSES["dual_clip"].fn(x, ppo.losses.dual_clip).loss.sum().backward()
    assert bool(range_problems(leaves(ppo))) == (logprobs.grad.abs().max() == 0)
