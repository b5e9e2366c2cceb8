"""Timeouts and messages of heartbeats, with a fake clock."""

import threading

from realhf.api.messages import Heartbeat
from realhf.system.transport.channel import ZmqMaster, ZmqWorker
from realhf.system.transport.heartbeat import HeartbeatMonitor, HeartbeatSender
from tests.system.transport.hostile_peers import KEY


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def receive_for(monitor: HeartbeatMonitor, clock: Clock, seconds: float, *heartbeats: Heartbeat) -> None:
    """Tick four times a second, and record heartbeats at the end."""
    for _ in range(int(seconds * 4)):
        clock.now += 0.25
        monitor.tick()
    for one in heartbeats:
        monitor.record(one)


def heartbeat(rank: int, activity: str = "gen/Compute") -> Heartbeat:
    return Heartbeat(rank, 40 + rank, "here", activity)


def test_a_silent_worker_is_reported_with_its_last_activity() -> None:
    clock = Clock()
    monitor = HeartbeatMonitor(3.0, clock)
    receive_for(monitor, clock, 1.0, heartbeat(0), heartbeat(1), heartbeat(2))
    receive_for(monitor, clock, 3.0, heartbeat(0))
    assert monitor.timed_out() == ()
    receive_for(monitor, clock, 0.5, heartbeat(2))
    assert monitor.timed_out() == (1,)
    assert monitor.timeout_message((1,)) == (
        "worker 1 (host here, process 41): no heartbeat for 3.5 s: its process is stopped, swapped out or blocked; "
        "last activity: gen/Compute"
    )
    assert monitor.activities((7, 2, 0)) == (
        "\n  worker 0 (host here, process 40): gen/Compute\n  worker 2 (host here, process 42): gen/Compute"
    )


def test_a_worker_without_a_heartbeat_is_still_starting() -> None:
    clock = Clock()
    monitor = HeartbeatMonitor(3.0, clock)
    receive_for(monitor, clock, 100.0)
    assert monitor.timed_out() == ()


def test_time_when_the_master_is_busy_does_not_count() -> None:
    clock = Clock()
    monitor = HeartbeatMonitor(3.0, clock)
    receive_for(monitor, clock, 1.0, heartbeat(0))
    clock.now += 1000.0
    monitor.tick()
    assert monitor.timed_out() == ()


def test_a_sender_sends_until_it_is_stopped() -> None:
    before = set(threading.enumerate())
    master = ZmqMaster(KEY, 1)
    worker = ZmqWorker(master.address, 0, KEY)
    sender = HeartbeatSender(worker, 0, 0.06, lambda: "this and that")
    messages = [master.receive(5.0) for _ in range(3)]
    assert [isinstance(message, Heartbeat) and message.activity for message in messages] == ["this and that"] * 3
    sender.stop()
    disabled = HeartbeatSender(worker, 0, 0.0, lambda: "")
    disabled.stop()
    assert set(threading.enumerate()) <= before
    worker.close()
    master.close()
