"""Corrections for a generator that differs from the trainer, against values computed by hand."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from realhf.algorithms.policy_gradient.config import Importance, PPOConfig
from realhf.algorithms.policy_gradient.losses.actor_loss import mismatch_of
from realhf.algorithms.policy_gradient.losses.corrections import CORRECTIONS, BandOptions, GeometricOptions
from realhf.experiments.options.checks import ppo_problems
from realhf.ops.rows import PackedRows

RATIOS = ((1.5, 3.0, 0.25), (1.0, 1.02))  # of two responses, each after a token of the prompt
CAP = 2.0
KEPT = [True] * 5
WORKED = {
    "none": ([1.0] * 5, KEPT, None),
    "tis": ([1.5, 2.0, 0.25, 1.0, 1.02], KEPT, None),
    "sequence_tis": ([1.125] * 3 + [1.02] * 2, KEPT, None),
    "mis": ([1.5, 3.0, 0.25, 1.0, 1.02], [True, False, True, True, True], None),
    "sequence_mis": ([1.125] * 3 + [1.02] * 2, KEPT, None),
    "icepop": ([1.5, 3.0, 0.25, 1.0, 1.02], [True, True, False, True, True], BandOptions()),
    "geometric": ([1.5, 2.0, 0.25, 1.0, 1.02], [False] * 3 + [True] * 2, GeometricOptions(0.98, 1.02)),
}


def found(name: str, ratios: tuple[tuple[float, ...], ...], options: object, cap: float = CAP) -> tuple[list, list]:
    lengths = tuple(len(row) + 1 for row in ratios)
    mask = torch.tensor([flag for row in ratios for flag in (False, *[True] * len(row))])
    trainer = torch.tensor([value for row in ratios for value in (5.0, *map(math.log, row))])
    mismatch = mismatch_of(trainer, torch.zeros(len(mask)), PackedRows(mask, lengths), cap)
    result = CORRECTIONS[name].fn(mismatch, options)
    is_kept = torch.ones_like(mask) if result.is_kept is None else result.is_kept
    assert result.weights.isfinite().all()
    return result.weights[mask].tolist(), is_kept[mask].tolist()


def test_every_correction_has_a_worked_case() -> None:
    assert WORKED.keys() == CORRECTIONS.keys() == {name.value for name in Importance}


@pytest.mark.parametrize("name", WORKED)
def test_worked_case(name: str) -> None:
    weights, kept, options = WORKED[name]
    assert found(name, RATIOS, options) == (pytest.approx(weights), kept)


def test_a_response_is_rejected_as_a_whole() -> None:
    assert found("sequence_mis", ((1.5, 1.5), (0.5, 0.5)), None)[1] == [False, False, True, True]


@given(st.lists(st.lists(st.floats(1e-30, 1e30), min_size=1, max_size=4), min_size=1, max_size=3))
def test_equal_policies_need_no_correction_and_large_ratios_are_finite(ratios: list[list[float]]) -> None:
    for name, (_, _, options) in WORKED.items():
        found(name, tuple(map(tuple, ratios)), options, math.inf)
        assert found(name, ((1.0, 1.0), (1.0,)), options) == ([1.0] * 3, [True] * 3)


def test_a_band_must_contain_equal_policies() -> None:
    ppo = PPOConfig(importance=Importance["icepop"])
    assert CORRECTIONS["icepop"].check(ppo) == []
    ppo.corrections.icepop.low = 1.5
    (problem,) = CORRECTIONS["icepop"].check(ppo)
    assert "ppo.corrections.icepop: the band 1.5 to 5 must contain 1" in problem


@pytest.mark.parametrize("name", [one.value for one in Importance])
@pytest.mark.parametrize("cap", [0.5, 1.0, 2.0, math.inf])
def test_a_cap_below_one_is_refused_where_it_rejects_equal_policies(name: str, cap: float) -> None:
    """Otherwise no token is trained, and the run ends well."""
    _, kept = found(name, ((1.0, 1.0), (1.0,)), WORKED[name][2], cap)
    problems = CORRECTIONS[name].check(PPOConfig(importance=Importance[name], is_weight_cap=cap))
    assert bool(problems) == (not all(kept))


def test_a_correction_needs_recomputed_log_probabilities() -> None:
    for name in Importance:
        ppo = PPOConfig(importance=name)
        assert ["has no effect" in line for line in ppo_problems(ppo, 8)] == [True] * (name.value != "tis")
        ppo.recompute_logprobs = True
        assert ppo_problems(ppo, 8) == []
