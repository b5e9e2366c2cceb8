"""The share of useful time and the cadence of checkpoints."""

from math import exp, sqrt

import pytest
from hypothesis import given
from hypothesis import strategies as st

from realhf.plan.goodput import (
    CheckpointTimes,
    FailureRate,
    best_cadence,
    checkpoint_overhead,
    daly_interval,
    scratch_share,
    useful_share,
)

seconds = st.floats(1.0, 1e3)
times = st.builds(CheckpointTimes, st.floats(0.0, 100.0), st.floats(0.0, 1000.0))
rates = st.builds(FailureRate, st.floats(500.0, 1e6), st.floats(0.0, 2000.0))


def test_a_worked_example() -> None:
    """Steps of 10 s, 6 of them between checkpoints, copies of 2 s; writing takes 14 s, 4 of which delay a step."""
    example = CheckpointTimes(2.0, 14.0)
    assert checkpoint_overhead(10.0, example) == 6.0
    # a launch of X seconds has the first checkpoint after 60 + 2 + 14 s, and another one every 66 s
    kept = 60 * sum(exp(-(76 + 66 * i) / 1000) for i in range(2000))
    down = 1000 * (exp(0.3) - 1)
    assert useful_share(10.0, 6, example, FailureRate(1000.0, 300.0)) == pytest.approx(kept / (1000 + down), rel=1e-9)


def test_rare_failures_cost_only_the_copies() -> None:
    share = useful_share(10.0, 20, CheckpointTimes(2.0, 5.0), FailureRate(1e12, 300.0))
    assert share == pytest.approx(200 / 202, rel=1e-6)


def test_dalys_estimate() -> None:
    """The intervals of the figures of Daly (2006): dumps of 5 min, and 24 h, 6 h and 15 min between failures."""
    assert [round(daly_interval(5, mtbf) / 1) for mtbf in (24 * 60, 6 * 60)] == [117, 57]
    assert daly_interval(5, 15) == pytest.approx(9.1, abs=0.1)
    assert daly_interval(1e-6, 1e6) == pytest.approx(sqrt(2), rel=1e-3)  # Young's estimate
    assert daly_interval(40.0, 10.0) == 10.0


@given(seconds, times, rates)
def test_the_cadence_is_the_best_of_all(step_s: float, checkpoint: CheckpointTimes, rate: FailureRate) -> None:
    limit = 400
    shares = {n: useful_share(step_s, n, checkpoint, rate) for n in range(1, limit + 1)}
    cadence = best_cadence(step_s, checkpoint, rate, limit)
    assert 1 <= cadence <= limit and shares[cadence] >= max(shares.values()) * (1 - 1e-9)


@given(seconds, times, rates, st.integers(1, 500), st.floats(1.0, 3.0))
def test_the_share_falls_with_failures_and_overheads(
    step_s: float, checkpoint: CheckpointTimes, rate: FailureRate, cadence: int, factor: float
) -> None:
    share = useful_share(step_s, cadence, checkpoint, rate)
    assert 0 <= share <= 1
    worse = [
        useful_share(step_s, cadence, checkpoint, FailureRate(rate.mtbf_s / factor, rate.down_s)),
        useful_share(step_s, cadence, checkpoint, FailureRate(rate.mtbf_s, rate.down_s * factor)),
        useful_share(step_s, cadence, CheckpointTimes(checkpoint.copy_s * factor, checkpoint.write_s), rate),
        useful_share(step_s, cadence, CheckpointTimes(checkpoint.copy_s, checkpoint.write_s * factor), rate),
    ]
    assert max(worse) <= share * (1 + 1e-12)


def test_a_run_from_scratch() -> None:
    assert scratch_share(1000.0, FailureRate(1e9, 10.0)) == pytest.approx(1, abs=1e-5)
    assert scratch_share(1000.0, FailureRate(1000.0, 0.0)) == pytest.approx(1 / (exp(1) - 1))
    assert scratch_share(1e9, FailureRate(1000.0, 0.0)) == 0.0


def test_failures_more_often_than_steps() -> None:
    rate = FailureRate(1.0, 5000.0)
    assert best_cadence(1e4, CheckpointTimes(10.0, 10.0), rate, 100) == 1
    assert useful_share(1e4, 1, CheckpointTimes(10.0, 10.0), rate) == 0.0
