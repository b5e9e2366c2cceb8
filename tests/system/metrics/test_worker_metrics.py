"""Shares of worker time, which add up also when calls overlap."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from realhf.api.messages import Done
from realhf.system.metrics.worker_metrics import WORKER_METRICS, StepMetrics
from tests.scaling import examples

N_WORKERS = 4
REPLIES = st.tuples(st.sampled_from(["gen", "rew", "train"]), st.integers(0, N_WORKERS - 1), st.integers(0, 10**6),
                    st.integers(0, 10**5))  # fmt: skip


def step_of(replies: list[tuple[str, int, int, int]]) -> StepMetrics:
    step = StepMetrics(N_WORKERS)
    for mfc, rank, compute, move in replies:
        step.add(mfc, Done(0, rank=rank, metrics=(compute, move, *(0 for _ in WORKER_METRICS[2:]))))
    return step


def test_calls_on_disjoint_workers_share_the_time() -> None:
    """Two calls of 0.8 s at the same time on two of four workers each: 40 % of the workers' time in one second."""
    replies = [("gen", rank, 800_000, 0) for rank in (0, 1)] + [("train", rank, 800_000, 100_000) for rank in (2, 3)]
    step = step_of(replies)
    assert step.shares(1.0) == pytest.approx({"time/gen_share": 0.4, "time/train_share": 0.4, "time/move_share": 0.05})
    assert step.metrics()["time/gen_s"] + step.metrics()["time/train_s"] > 1.0, "the times do not add up"


@settings(max_examples=examples(100))
@given(st.lists(REPLIES, max_size=20), st.floats(1e-6, 100))
def test_shares_add_up_to_at_most_one(replies: list[tuple[str, int, int, int]], seconds: float) -> None:
    shares = step_of(replies).shares(seconds)
    assert sum(shares.values()) <= 1 + 1e-9 and all(share > 0 for share in shares.values())
    busy = sum(compute + move for _, _, compute, move in replies)
    if busy <= seconds * 1e6 * N_WORKERS:
        assert sum(shares.values()) == pytest.approx(busy / (seconds * 1e6 * N_WORKERS), abs=1e-9)
