"""Simulated pipelines against formulas of the literature."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from realhf.plan.compile.pipeline import inference_schedule, train_schedule
from realhf.plan.cost.pipeline_time import makespan, uniform_makespan
from tests.scaling import examples


@pytest.mark.parametrize("n_stages", [1, 2, 3, 5])
@pytest.mark.parametrize("n", [1, 2, 4, 9])
def test_bubble_of_equal_stages(n_stages: int, n: int) -> None:
    """Narayanan et al. 2021, section 2.2: (m + p - 1) * (forward + backward)."""
    train = [train_schedule(stage, n_stages, n) for stage in range(n_stages)]
    seconds = makespan(train, lambda s, i: 1.0, lambda s, i: 2.0, lambda s, i: 0.0)
    assert seconds == pytest.approx(3.0 * (n + n_stages - 1))
    infer = [inference_schedule(stage, n_stages, n) for stage in range(n_stages)]
    assert makespan(infer, lambda s, i: 1.0, lambda s, i: 0.0, lambda s, i: 0.0) == pytest.approx(n + n_stages - 1)


@settings(max_examples=examples(60))
@given(st.integers(2, 8), st.integers(1, 4), st.integers(1, 33), st.floats(0.5, 4.0))
def test_bubble_of_interleaved_stages(n_stages: int, n_chunks: int, n: int, backward: float) -> None:
    """Narayanan et al. 2021, section 2.2: the bubble of 1F1B divided by the number of chunks; never more than it."""
    train, infer = (
        makespan([schedule(stage, n_stages, n, n_chunks) for stage in range(n_stages)], lambda c, i: 1 / n_chunks,
                 lambda c, i: backward / n_chunks, lambda c, i: 0.0)
        for schedule in (train_schedule, inference_schedule)
    )  # fmt: skip
    ideal, bubble = n * (1 + backward), (n_stages - 1) * (1 + backward)
    if n % n_stages == 0:
        assert train == pytest.approx(ideal + bubble / n_chunks)
    if n >= n_stages:
        assert infer == pytest.approx(n + (n_stages - 1) / n_chunks)
    assert train <= (ideal + bubble) * (1 + 1e-9) and infer <= (n + n_stages - 1) * (1 + 1e-9)


def test_slowest_stage_dominates_and_sends_add_up() -> None:
    infer = [inference_schedule(stage, 3, 10) for stage in range(3)]
    times = (1.0, 4.0, 2.0)
    assert makespan(infer, lambda s, i: times[s], lambda s, i: 0.0, lambda s, i: 0.5) == pytest.approx(
        1 + 0.5 + 40 + 0.5 + 2
    )


@settings(max_examples=examples(60))
@given(st.data())
def test_extrapolation_of_long_uniform_pipelines(data: st.DataObject) -> None:
    n_stages, n = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 60))
    n_chunks = data.draw(st.integers(1, 3)) if n_stages > 1 else 1
    size = n_stages * n_chunks
    seconds = st.lists(st.floats(0.1, 10.0), min_size=size, max_size=size).map(tuple)
    forward, backward = data.draw(seconds), data.draw(seconds)
    send, rel = (0.05,) * size, 0.02 if n_chunks == 1 else 0.05
    for schedule in (train_schedule, inference_schedule):
        steps = [schedule(stage, n_stages, n, n_chunks) for stage in range(n_stages)]
        whole = makespan(steps, lambda c, i: forward[c], lambda c, i: backward[c], lambda c, i: send[c])
        assert uniform_makespan(schedule, n, forward, backward, send, n_chunks) == pytest.approx(whole, rel=rel)


def test_deadlocks_are_detected() -> None:
    with pytest.raises(AssertionError, match="deadlock"):
        makespan(
            [train_schedule(1, 2, 1), train_schedule(1, 2, 1)], lambda s, i: 1.0, lambda s, i: 1.0, lambda s, i: 0.0
        )
