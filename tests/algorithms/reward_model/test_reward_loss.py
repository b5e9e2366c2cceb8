"""Losses of reward models against values computed by hand."""

import math

import pytest
import torch

from realhf.algorithms.preference.pairs import Pairs, ranked_pairs
from realhf.algorithms.reward_model.reward_model import comparison_loss, label_loss
from realhf.api.batch_meta import RowId


def test_pairs_by_hand():
    """Two pairs of one prompt, one of another: log(1 + e^-1) / 2 + log(1 + e^2) / 2 + log 2."""
    scores = torch.tensor([2.0, 1.0, -1.0, 1.0, 5.0, 5.0], requires_grad=True)
    loss = comparison_loss(scores, Pairs([0, 2, 4], [1, 3, 5], [0.5, 0.5, 1.0]))
    want = 0.5 * math.log(1 + math.exp(-1)) + 0.5 * math.log(1 + math.exp(2)) + math.log(2)
    assert loss.total.item() == pytest.approx(want)
    loss.total.backward()
    slopes = [0.5 / (1 + math.exp(1)), 0.5 / (1 + math.exp(-2)), 0.5]  # weight * sigmoid(-margin)
    assert scores.grad.tolist() == pytest.approx([x for s in slopes for x in (-s, s)])
    values = {name: (float(value), float(count)) for name, (value, count) in loss.stats.items()}
    assert values.pop("loss") == pytest.approx((want, 2))
    assert values == {"accuracy": (1, 3), "margin": (-1, 3), "chosen_score": (6, 3), "rejected_score": (7, 3)}


def test_a_ranked_list_by_hand():
    """Scores 1, 0, 0: pairs with margins 1, 1, 0, their mean, and reg / 2 times the mean of the sums of squares."""
    pairs = ranked_pairs([RowId(0, 0), RowId(0, 1), RowId(0, 2)])
    loss = comparison_loss(torch.tensor([1.0, 0.0, 0.0]), pairs, l2=0.3)
    want = (2 * math.log(1 + math.exp(-1)) + math.log(2)) / 3 + 0.15 * (1 + 1 + 0) / 3
    assert loss.total.item() == pytest.approx(want)
    assert [float(x) for x in loss.stats["accuracy"]] == [2, 3]


def test_extreme_scores_are_finite():
    scores = torch.tensor([-2000.0, 2000.0], requires_grad=True)
    loss = comparison_loss(scores, Pairs([0], [1], [1.0]))
    loss.total.backward()
    assert loss.total.item() == 4000.0 and scores.grad.tolist() == [-1.0, 1.0]


def test_labels_by_hand_hard_and_soft():
    logits = torch.tensor([0.0, 9.0, 2.0, -1.0], requires_grad=True)
    labels = torch.tensor([1.0, -1.0, 0.0, 0.75])
    loss = label_loss(logits, labels)
    p = [1 / (1 + math.exp(-x)) for x in (0.0, 2.0, -1.0)]
    want = -math.log(p[0]) - math.log(1 - p[1]) - 0.75 * math.log(p[2]) - 0.25 * math.log(1 - p[2])
    assert loss.total.item() == pytest.approx(want, rel=1e-6)
    loss.total.backward()
    assert logits.grad.tolist() == pytest.approx([p[0] - 1, 0.0, p[1], p[2] - 0.75])
    values = {name: (float(value), float(count)) for name, (value, count) in loss.stats.items()}
    assert values["accuracy"] == (0, 3)  # a logit of 0 is wrong
    assert values["right_score"] == pytest.approx((p[0] + p[2], 2))
    assert values["wrong_score"] == pytest.approx((p[1], 1)) and values["loss"][1] == 3


def test_without_labels_the_loss_is_0():
    loss = label_loss(torch.zeros(3, requires_grad=True), torch.full((3,), -1.0))
    loss.total.backward()
    assert loss.total.item() == 0.0 and all(float(count) == 0 for _, count in loss.stats.values())
    assert comparison_loss(torch.zeros(0), Pairs([], [], [])).total.item() == 0.0
