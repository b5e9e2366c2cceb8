"""Lanes of intervals that overlap."""

from hypothesis import given
from hypothesis import strategies as st

from realhf.base.timers import lanes_of

SPANS = st.lists(st.tuples(st.just("x"), st.integers(0, 50), st.integers(0, 20)), max_size=40)


@given(SPANS)
def test_intervals_of_a_lane_do_not_overlap(spans: list[tuple[str, int, int]]) -> None:
    lanes = lanes_of(spans)
    for lane in set(lanes):
        own = sorted(span[1:] for span, at in zip(spans, lanes, strict=True) if at == lane)
        assert all(start + duration <= after for (start, duration), (after, _) in zip(own, own[1:], strict=False))
    times = {start for _, start, _ in spans}
    most = max((sum(start <= t < start + max(d, 1) for _, start, d in spans) for t in times), default=0)
    assert len(set(lanes)) <= max(most, 1) and set(lanes) == set(range(len(set(lanes))))
