"""Steps of the data stream."""

import pytest

from realhf.plan.train_schedule import PromptRange, make_train_schedule


@pytest.mark.parametrize(
    ("epochs", "max_steps", "steps", "last"),
    [(1, None, 3, 2), (3, None, 8, 2), (3, 5, 5, 4), (1, 99, 3, 2), (2, None, 5, 4)],
)
def test_train_schedule(epochs: int, max_steps: int | None, steps: int, last: int) -> None:
    schedule = make_train_schedule(4, 10, epochs, max_steps)
    assert schedule.n_steps == steps
    span = schedule.span(steps - 1)
    assert span == PromptRange(steps - 1, 4 * (steps - 1), 4 * (steps - 1) + last)
