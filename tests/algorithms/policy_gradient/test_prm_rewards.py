"""Step rewards against values computed by hand, and properties of Clip and Delta."""

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from realhf.algorithms.policy_gradient.prm_rewards import Delta, aggregate, clip, delta
from realhf.api.config.preference import Aggregate
from realhf.data.batch import Column

Q = [0.5, 0.75, 0.25, 1.0, 0.5]
COUNTS = (3, 2)
ROWS = st.lists(st.lists(st.floats(0, 1), min_size=1, max_size=6), min_size=1, max_size=5)


def packed(rows: list[list[float]]) -> tuple[Tensor, list[int]]:
    return torch.tensor([x for row in rows for x in row], dtype=torch.float64), [len(row) for row in rows]


def to_go(rewards: Tensor, counts: list[int]) -> Tensor:
    """Return the sum of rewards from each step to the end of its response."""
    return torch.cat([row.flip(0).cumsum(0).flip(0) for row in rewards.split(counts)])


@pytest.mark.parametrize(
    ("how", "values"),
    [
        (Aggregate.min, [0.25, 0.5]),
        (Aggregate.prod, [0.09375, 0.5]),
        (Aggregate.last, [0.25, 0.5]),
        (Aggregate.mean, [0.5, 0.75]),
    ],
)
def test_aggregate(how: Aggregate, values: list[float]) -> None:
    assert aggregate(Column(torch.tensor(Q), COUNTS), how).tolist() == values
    assert aggregate(Column(torch.tensor(Q), (3, 0, 2)), how).isnan().tolist() == [False, True, False]
    assert aggregate(Column(torch.empty(0), ()), how).tolist() == []


def test_clip() -> None:
    q = torch.tensor(Q)
    assert clip(q, 0.5).tolist() == [0, 0, -0.25, 0, 0]
    assert clip(q[:0], 0.5).tolist() == []


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        (Delta.none, Q),
        (Delta.paper, [-0.25, 0.75, 0.0, 1.0, 0.0]),
        (Delta.potential, [0.25, -0.5, 0.0, -0.5, 0.0]),
    ],
)
def test_delta(kind: Delta, values: list[float]) -> None:
    assert delta(Column(torch.tensor(Q), COUNTS), kind).tolist() == values


@pytest.mark.parametrize("kind", [Delta.paper, Delta.potential])
def test_delta_of_a_single_step_is_0(kind: Delta) -> None:
    assert delta(Column(torch.tensor([0.5, 0.25]), (1, 0, 1)), kind).tolist() == [0, 0]


def step_rewards(
    q: Tensor, success: Tensor, counts: Sequence[int], alpha: float, eta: float | None = None, kind: Delta = Delta.none
) -> Tensor:
    """Return the shaped step rewards plus the success on the last step of each response."""
    rewards = alpha * delta(Column(q if eta is None else clip(q, eta), tuple(counts)), kind)
    return rewards.index_add(0, torch.tensor(counts).cumsum(0) - 1, success.to(rewards.dtype))


def test_clip_is_applied_before_delta_and_success_on_the_last_step() -> None:
    q, success = torch.tensor(Q), torch.tensor([1.0, 0.0])
    assert step_rewards(q, success, COUNTS, alpha=2.0).tolist() == [1.0, 1.5, 1.5, 2.0, 1.0]
    both = step_rewards(q, success, COUNTS, alpha=2.0, eta=1.0, kind=Delta.paper)
    assert both.tolist() == [-0.5, -0.5, 1.0, 0.0, 0.0]  # q' = -0.5 -0.25 -0.75 | 0 -0.5


def test_inconsistent_lengths() -> None:
    with pytest.raises(ValueError, match="for rows with 4 elements"):
        delta(Column(torch.tensor(Q), (3, 1)), Delta.paper)


@given(ROWS, st.floats(0, 1), st.floats(0, 2))
def test_with_clip_the_reward_to_go_is_at_most_the_success(rows: list[list[float]], eta: float, alpha: float) -> None:
    q, counts = packed(rows)
    success = torch.ones(len(rows), dtype=torch.float64)
    rewards = step_rewards(q, success, counts, alpha, eta=eta)
    assert (to_go(rewards, counts) <= 1 + 1e-9).all()


@given(ROWS, st.floats(0, 2))
def test_with_delta_rewards_to_go_telescope(rows: list[list[float]], alpha: float) -> None:
    q, counts = packed(rows)
    success = torch.arange(len(rows), dtype=torch.float64)
    paper, potential = (to_go(step_rewards(q, success, counts, alpha, kind=k), counts).split(counts)
                        for k in (Delta.paper, Delta.potential))  # fmt: skip
    for own, row, a, b in zip(success, q.split(counts), paper, potential, strict=True):
        assert torch.allclose(a[:-1], alpha * row[:-1] + own) and torch.allclose(a[-1], own)
        assert torch.allclose(b, alpha * (row[-1] - row) + own)


@given(ROWS, st.integers(1, 4), st.floats(0, 1))
def test_repeating_a_step_does_not_change_the_return(rows: list[list[float]], times: int, eta: float) -> None:
    """Repeats the first step ``times`` times; the return is the same under Clip and Delta."""
    row = [*rows[0], 0.5]
    long = [row[0]] * times + row
    one = torch.ones(1)
    short, repeated = (
        step_rewards(torch.tensor(q), one, [len(q)], 1.0, eta=eta, kind=Delta.paper).sum() for q in (row, long)
    )
    assert torch.allclose(short, repeated, atol=1e-5)
