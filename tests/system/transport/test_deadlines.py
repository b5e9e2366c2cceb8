"""Deadlines of workers count only the time in which the master receives, with a fake clock."""

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from realhf.api.messages import Hello, ToMaster
from realhf.base.errors import WorkerTimeout
from realhf.system.transport import channel
from realhf.system.transport.heartbeat import HeartbeatMonitor
from realhf.system.transport.reply_receiver import ReplyReceiver

LIMIT_S = 5.0


class Stops:
    """A channel without messages except a last one; each call takes a time, as if the master were stopped in it."""

    def __init__(self, seconds: list[float]) -> None:
        self.seconds, self.now = list(seconds), 0.0

    def receive(self, timeout_s: float) -> ToMaster | None:
        if not self.seconds:
            return Hello(0, 1, "here", 0)
        self.now += self.seconds.pop(0)
        return None


def waited(seconds: list[float]) -> float:
    """Return the time until the message, by the clock; ``WorkerTimeout`` if the worker is blamed."""
    stops = Stops(seconds)
    monitor = HeartbeatMonitor(LIMIT_S, lambda: stops.now)
    receiver = ReplyReceiver(stops, dict, str, str, heartbeats=monitor)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(channel, "time", SimpleNamespace(monotonic=lambda: stops.now))
        receiver.receive_all(Hello, (0,), LIMIT_S, "to start")
    return stops.now


@given(st.lists(st.floats(1.0, 1e6), min_size=1, max_size=4))
def test_a_stopped_master_blames_no_worker(seconds: list[float]) -> None:
    assert waited(seconds) == pytest.approx(sum(seconds))


@given(st.lists(st.floats(0.05, 0.2), min_size=120, max_size=200))
def test_a_master_that_receives_reports_a_late_worker(seconds: list[float]) -> None:
    with pytest.raises(WorkerTimeout, match="waited 5 s for worker 0 to start"):
        waited(seconds)
