"""Advantage estimators against their definitions."""

from dataclasses import replace
from statistics import mean, pstdev, stdev

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from realhf.algorithms.policy_gradient.advantages import (
    ADVANTAGES,
    AdvantageInputs,
    GroupOptions,
    GroupStd,
    TurnOptions,
    equal_in_group,
    group_advantages,
    leave_one_out,
)
from realhf.algorithms.policy_gradient.config import Advantage, PPOConfig
from realhf.api.batch_meta import RowId
from realhf.api.config import KLPlace
from realhf.data.batch import Column, SequenceBatch
from realhf.ops.rows import PackedRows
from tests.scaling import examples

# two responses to prompt 0, of two tokens and of one, and one response to prompt 1; one prompt token each
LENGTHS = (3, 2, 2)
REWARDS = torch.tensor([0.0, 1.0, 2.0, 0.0, 1.0, 0.0, 5.0], dtype=torch.float64)
VALUES = torch.tensor([0.5, 1.0, 9.0, 0.0, 9.0, 2.0, 3.0], dtype=torch.float64)
SCORES = (3.0, 3.0, 3.0, 1.0, 1.0, 5.0, 5.0)
# process: step rewards 1 and 0 at the tokens of the first response, 1 and 4 at the others; mean and std of 1, 0.5, 1
HIGH, LOW = ((x - 2.5 / 3) / (pstdev([1.0, 0.5, 1.0]) + 1e-5) for x in (1.0, 0.5))
# gae, discount 0.5 and lambda 0.5: the last response is truncated, so its last value bootstraps
D2, D1 = 2.0 - 1.0, 1.0 + 0.5 * 1.0 - 0.5
WORKED: dict[str, tuple[list[float], list[float], object]] = {
    "gae": (
        [0, D1 + 0.25 * D2, D2, 0, 1.0, 0, 5.0 + 0.5 * 3.0 - 2.0],
        [0, D1 + 0.25 * D2 + 0.5, D2 + 1.0, 0, 1.0, 0, 5.0 + 0.5 * 3.0],
        None,
    ),
    "group": ([1 / (1 + 1e-5)] * 3 + [-1 / (1 + 1e-5)] * 2 + [0] * 2, list(SCORES), GroupOptions()),
    "turn": ([0, *[1 / (1 + 1e-5)] * 2, 0, -1 / (1 + 1e-5), 0, 0], [0, 3, 3, 0, 1, 0, 5], TurnOptions()),
    # gdpo: the first reward has weight 2; the second, of weight -3, orders the responses the other way
    "gdpo": ([5 / (1 + 1e-5)] * 3 + [-5 / (1 + 1e-5)] * 2 + [0] * 2, list(SCORES), None),
    "rloo": ([2] * 3 + [-2] * 2 + [0] * 2, list(SCORES), None),
    "opo": ([2 / 3] * 3 + [-4 / 3] * 2 + [0] * 2, list(SCORES), None),
    "greedy_baseline": ([2.5] * 3 + [0] * 2 + [5.5] * 2, list(SCORES), None),
    "precomputed": ([0, 1, 2, 0, 3, 0, 4], list(SCORES), None),
    "process": ([HIGH + LOW, HIGH + LOW, LOW, HIGH, HIGH, 0, 0], list(SCORES), None),
}


def inputs_of(n_rows: int = 3) -> AdvantageInputs:
    columns = {
        "truncated": Column.scalars(torch.tensor([0, 0, 1])),
        "baseline": Column.scalars(torch.tensor([0.5, 1.0, -0.5])),
        "reward_parts": Column(torch.tensor([2.0, -3, 5, 8, 2, -3, 3, 10, 2, -3, 1, 1]), (4, 4, 4)),
        "advantages": Column(torch.tensor([0.0, 1, 2, 0, 3, 0, 4]), LENGTHS),
        "step_rewards": Column(torch.tensor([-1, 1.0, 0.5, -1, 1.0, -1, 4.0], dtype=torch.float64), LENGTHS),
    }
    batch = SequenceBatch((RowId(0, 0), RowId(0, 1), RowId(1, 0)), columns).select(range(n_rows))
    lengths = LENGTHS[:n_rows]
    mask = torch.tensor([False, True, True, False, True, False, True])[: sum(lengths)]
    row_of_token = torch.arange(n_rows).repeat_interleave(torch.tensor(lengths, dtype=torch.int64))
    return AdvantageInputs(batch, REWARDS[: sum(lengths)], VALUES[: sum(lengths)], PackedRows(mask, lengths),
                           PackedRows(mask, lengths), row_of_token, discount=0.5, lambdas=[0.5] * n_rows)  # fmt: skip


def test_gdpo_refuses_what_it_does_not_read() -> None:
    ppo = PPOConfig(group_size=2, disable_value=True, advantage=Advantage["gdpo"], overlong_buffer=4)
    assert ADVANTAGES["gdpo"].check(ppo) == [
        "ppo.advantage=gdpo reads the scores of each reward, and not ppo.kl_in=reward",
        "ppo.advantage=gdpo reads the scores of each reward, and not ppo.overlong_buffer",
    ]
    assert ADVANTAGES["gdpo"].check(replace(ppo, kl_in=KLPlace.loss, overlong_buffer=0)) == []


def test_every_estimator_has_a_worked_case_and_a_source() -> None:
    assert WORKED.keys() == ADVANTAGES.keys()
    assert all("arXiv" in estimator.doc and "\n" not in estimator.doc for estimator in ADVANTAGES.values())


@pytest.mark.parametrize("name", ADVANTAGES)
def test_worked_case(name: str) -> None:
    advantages, returns, options = WORKED[name]
    result = ADVANTAGES[name].fn(inputs_of(), options)
    assert result[0].tolist() == pytest.approx(advantages, abs=1e-6)
    assert result[1].tolist() == pytest.approx(returns, abs=1e-6)
    empty = ADVANTAGES[name].fn(inputs_of(0), options)
    assert [column.tolist() for column in empty] == [[], []]


@pytest.mark.parametrize(("name", "of_first"), [("group", 1 / (1 + 1e-5)), ("rloo", 2.0), ("process", HIGH + LOW)])
def test_a_response_that_is_not_trained_on_is_not_in_its_group(name: str, of_first: float) -> None:
    """The reward of a truncated third response to prompt 0 does not affect the others."""
    inputs = inputs_of()
    assert ADVANTAGES[name].fn(inputs, WORKED[name][2])[0][1].item() == pytest.approx(of_first, abs=1e-6)
    for penalty in (-100.0, 0.0, 5.0):
        batch = replace(inputs.batch, ids=(RowId(0, 0), RowId(0, 1), RowId(0, 2)))
        rewards = inputs.rewards.clone()
        rewards[-1] = penalty
        trained = PackedRows(inputs.rows.mask & (inputs.row_of_token < 2), LENGTHS)
        masked = replace(inputs, batch=batch, rewards=rewards, trained=trained)
        found = ADVANTAGES[name].fn(masked, WORKED[name][2])[0]
        assert found[:5].tolist() == pytest.approx(WORKED[name][0][:5], abs=1e-6) and found[5:].tolist() == [0, 0]


scored = st.lists(st.tuples(st.integers(0, 3), st.floats(-2, 2, width=32)), max_size=14)


@settings(max_examples=examples(60))
@given(scored, st.sampled_from(GroupStd))
def test_group_statistics_do_not_depend_on_the_order_of_rows(rows: list[tuple[int, float]], std: GroupStd) -> None:
    groups, scores = [g for g, _ in rows], torch.tensor([s for _, s in rows], dtype=torch.float64)
    advantages = group_advantages(scores, groups, std).tolist()
    left_out = leave_one_out(scores, groups).tolist()
    for i, (group, score) in enumerate(rows):
        own = [s for g, s in rows if g == group]
        others = [s for j, (g, s) in enumerate(rows) if g == group and j != i]
        same = min(own) == max(own)
        assert equal_in_group(scores, groups)[i] is same
        if same:
            assert advantages[i] == 0.0
        else:
            by = {GroupStd.population: pstdev, GroupStd.sample: stdev}.get(std)
            scale = by(own) + 1e-5 if by else 1.0
            assert advantages[i] == pytest.approx((score - mean(own)) / scale, abs=1e-6)
        assert left_out[i] == pytest.approx(score - mean(others) if others else 0.0, abs=1e-9)


def test_one_group() -> None:
    scores = torch.tensor([1.0, 0.0, 0.0, 0.0, 5.0])
    assert group_advantages(scores, [7, 7, 7, 7, 2], GroupStd.none).tolist() == [0.75, -0.25, -0.25, -0.25, 0.0]
    assert group_advantages(scores, [7, 7, 7, 7, 2], GroupStd.sample).tolist() == pytest.approx(
        [1.49997, -0.49999, -0.49999, -0.49999, 0.0], abs=1e-5
    )
    assert leave_one_out(scores, [7, 7, 7, 7, 2]).tolist() == pytest.approx([1.0, -1 / 3, -1 / 3, -1 / 3, 0.0])
