"""Warm-up and decay of the learning rate."""

import pytest

from realhf.api.config import LRSchedule, OptimizerConfig
from realhf.plan.learning_rate import learning_rate


def rate(step: int, total: int, **fields: object) -> float:
    return learning_rate(OptimizerConfig(lr=2.0, **fields), step, total)


def test_learning_rate_at_boundaries() -> None:
    warm = {"warmup_steps_proportion": 0.25, "lr_scheduler_type": LRSchedule.constant}
    assert [rate(s, 16, **warm) for s in range(6)] == [0.5, 1.0, 1.5, 2.0, 2.0, 2.0]
    cold = {"warmup_steps_proportion": 0.0}
    for schedule in LRSchedule:
        assert rate(0, 10, lr_scheduler_type=schedule, **cold) == 2.0
        assert rate(0, 1, lr_scheduler_type=schedule, **cold) == 2.0
    half = {LRSchedule.constant: 2.0, LRSchedule.linear: 1.0, LRSchedule.cosine: 1.0}
    minimum = {LRSchedule.constant: 2.0, LRSchedule.linear: 0.5, LRSchedule.cosine: 0.5}
    for schedule in LRSchedule:
        assert rate(5, 10, lr_scheduler_type=schedule, **cold) == pytest.approx(half[schedule])
        for late in (10, 11, 1000):  # after the last step the rate is constant
            assert rate(late, 10, lr_scheduler_type=schedule, min_lr_ratio=0.25, **cold) == pytest.approx(
                minimum[schedule]
            )
    assert rate(0, 1, warmup_steps_proportion=1.0) == 2.0
    ramp = [rate(s, 10, warmup_steps_proportion=1.0) for s in range(10)]
    assert ramp == pytest.approx([0.2 * (s + 1) for s in range(10)])


def test_the_rate_never_increases_after_warm_up() -> None:
    for schedule in LRSchedule:
        rates = [rate(s, 40, lr_scheduler_type=schedule, warmup_steps_proportion=0.1) for s in range(40)]
        assert rates[:4] == sorted(rates[:4]) and rates[4:] == sorted(rates[4:], reverse=True)
        assert all(0 < r <= 2.0 for r in rates)
