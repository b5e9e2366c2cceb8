"""Losses of reward models against sums written out, and steps of answers."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from realhf.algorithms.pairs import Pairs, ranked_pairs
from realhf.algorithms.reward_loss import aggregate_steps, comparison_loss, label_loss, step_ends
from realhf.api.batch import RowId
from realhf.api.config import Aggregate

BREAK, EOS = 8, 9
SEPARATORS = torch.tensor([BREAK, EOS])


def test_pairs_by_hand():
    """Two pairs of one prompt, one of another: log(1 + e^-1) / 2 + log(1 + e^2) / 2 + log 2."""
    scores = torch.tensor([2.0, 1.0, -1.0, 1.0, 5.0, 5.0], requires_grad=True)
    loss = comparison_loss(scores, Pairs([0, 2, 4], [1, 3, 5], [0.5, 0.5, 1.0]))
    want = 0.5 * math.log(1 + math.exp(-1)) + 0.5 * math.log(1 + math.exp(2)) + math.log(2)
    assert loss.total.item() == pytest.approx(want)
    loss.total.backward()
    slopes = [0.5 / (1 + math.exp(1)), 0.5 / (1 + math.exp(-2)), 0.5]  # weight * sigmoid(-margin)
    assert scores.grad.tolist() == pytest.approx([x for s in slopes for x in (-s, s)])
    found = {name: (float(value), float(count)) for name, (value, count) in loss.stats.items()}
    assert found.pop("loss") == pytest.approx((want, 2))
    assert found == {"accuracy": (1, 3), "margin": (-1, 3), "chosen_score": (6, 3), "rejected_score": (7, 3)}


def test_a_ranked_list_by_hand():
    """Scores 1, 0, 0: pairs with margins 1, 1, 0, their mean, and reg / 2 times the mean of the sums of squares."""
    pairs = ranked_pairs([RowId(0, 0), RowId(0, 1), RowId(0, 2)])
    loss = comparison_loss(torch.tensor([1.0, 0.0, 0.0]), pairs, l2=0.3)
    want = (2 * math.log(1 + math.exp(-1)) + math.log(2)) / 3 + 0.15 * (1 + 1 + 0) / 3
    assert loss.total.item() == pytest.approx(want)
    assert [float(x) for x in loss.stats["accuracy"]] == [2, 3]


def test_scores_far_apart_stay_finite():
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
    found = {name: (float(value), float(count)) for name, (value, count) in loss.stats.items()}
    assert found["accuracy"] == (0, 3)  # a logit of 0 is on no side
    assert found["right_score"] == pytest.approx((p[0] + p[2], 2))
    assert found["wrong_score"] == pytest.approx((p[1], 1)) and found["loss"][1] == 3


def test_nothing_labelled_costs_nothing():
    loss = label_loss(torch.zeros(3, requires_grad=True), torch.full((3,), -1.0))
    loss.total.backward()
    assert loss.total.item() == 0.0 and all(float(count) == 0 for _, count in loss.stats.values())
    assert comparison_loss(torch.zeros(0), Pairs([], [], [])).total.item() == 0.0


@pytest.mark.parametrize(
    ("answer", "ends"),
    [
        ([1, 2, BREAK, 3, EOS], [2, 4]),
        ([1, BREAK, BREAK, 2, BREAK, EOS], [2, 5]),  # blank lines go with the step before them
        ([BREAK, 1, BREAK, 2], [2, 3]),  # and at the start with the first step; a cut answer ends where it is cut
        ([1, BREAK], [1]),
        ([EOS], [0]),
        ([BREAK, BREAK], [1]),
    ],
)
def test_where_steps_end(answer, ends):
    prompt = [1, BREAK, 2]
    tokens, mask = torch.tensor(prompt + answer), torch.tensor([1] * 3 + [0] * len(answer))
    assert (step_ends(tokens, mask, SEPARATORS).nonzero().flatten() - 3).tolist() == ends


@given(st.lists(st.sampled_from([1, 2, BREAK]), min_size=1, max_size=12))
def test_every_step_has_something_in_it(answer):
    tokens = torch.tensor([5, *answer])
    ends = step_ends(tokens, torch.tensor([1] + [0] * len(answer)), SEPARATORS).nonzero().flatten().tolist()
    starts = [1, *(end + 1 for end in ends[:-1])]
    assert ends[-1] == len(answer)
    steps = [tokens[a : b + 1].tolist() for a, b in zip(starts, ends, strict=True)]
    assert all(set(step) != {BREAK} for step in steps) or set(answer) == {BREAK}
    assert len(steps) == max(1, len([line for line in "".join("\n" if t == BREAK else "x" for t in answer).split("\n")
                                     if line]))  # fmt: skip


@given(st.lists(st.floats(0, 1), min_size=1, max_size=6))
def test_aggregates_agree_with_python(scores):
    x = torch.tensor(scores, dtype=torch.float64)
    want = {"min": min(scores), "prod": math.prod(scores), "last": scores[-1], "mean": sum(scores) / len(scores)}
    assert {how.name: aggregate_steps(x, how).item() for how in Aggregate} == pytest.approx(want)
