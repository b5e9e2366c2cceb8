"""Rewards for lengths against values computed by hand."""

import math

import pytest
import torch

from realhf.algorithms.policy_gradient.config import LengthPenalty, PPOConfig
from realhf.algorithms.policy_gradient.length_penalties import (
    LENGTH_PENALTIES,
    GroupLengthOptions,
    LengthInputs,
    LinearOptions,
    TargetOptions,
)
from realhf.experiments.options.checks import ppo_problems

REWARDS, LENGTHS, GROUPS = (1.0, -1.0, 1.0, 2.0, 1.0), (10.0, 20.0, 30.0, 5.0, 15.0), (7, 7, 7, 9, 9)
MEAN, STD = 10.0, 5.0  # of the second group; 20 and 10 of the right responses of the first


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


WORKED = {
    "none": (None, (0.0,) * 5),
    "linear": (LinearOptions(coef=0.5), (-0.1, -0.2, -0.3, -0.05, -0.15)),
    "target": (TargetOptions(tokens=12.0, coef=0.1), (-0.2, -0.8, -1.8, -0.7, -0.3)),
    "group_range": (GroupLengthOptions(coef=2.0), (1.0, 0.0, -1.0, 1.0, -1.0)),
    "group_sigmoid": (
        GroupLengthOptions(coef=0.5),
        (-0.5 * sigmoid(-1), 0.0, -0.5 * sigmoid(1), -1.0 * sigmoid(-1), -0.5 * sigmoid(1)),
    ),
}


@pytest.mark.parametrize("name", LENGTH_PENALTIES)
def test_worked_case(name: str) -> None:
    options, expected = WORKED[name]
    inputs = LengthInputs(torch.tensor(REWARDS), torch.tensor(LENGTHS), GROUPS, 50)
    assert LENGTH_PENALTIES[name].fn(inputs, options).tolist() == pytest.approx(expected, abs=1e-5)
    assert name in ("none", "linear") or "arXiv" in LENGTH_PENALTIES[name].doc


def test_a_wrong_response_has_no_bonus_for_its_shortness() -> None:
    inputs = LengthInputs(torch.tensor([-1.0, 1.0, 1.0]), torch.tensor([1.0, 5.0, 5.0]), [0, 0, 0], 50)
    assert LENGTH_PENALTIES["group_range"].fn(inputs, GroupLengthOptions(coef=1.0)).tolist() == [0.0, -0.5, -0.5]


@pytest.mark.parametrize("name", ["group_range", "group_sigmoid"])
def test_groups_of_one_or_of_equal_lengths(name: str) -> None:
    inputs = LengthInputs(torch.ones(3), torch.tensor([4.0, 6.0, 6.0]), [0, 1, 1], 50)
    found = LENGTH_PENALTIES[name].fn(inputs, GroupLengthOptions(coef=1.0)).tolist()
    assert found == pytest.approx([0.0] * 3 if name == "group_range" else [-0.5] * 3)


def test_group_penalties_need_groups() -> None:
    problem = "ppo.length_penalty=group_range compares responses: it needs ppo.group_size > 1"
    assert ppo_problems(PPOConfig(length_penalty=LengthPenalty["group_range"]), 8) == [problem]
