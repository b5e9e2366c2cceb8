"""Who is silent, and what is told of whom; time is what a fake clock says."""

import threading

from realhf.api.messages import Heartbeat
from realhf.system.transport.channel import ZmqMaster, ZmqWorker
from realhf.system.transport.heartbeat import HeartbeatMonitor, HeartbeatSender
from tests.system.transport.hostile_peers import KEY


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def listened(pulses: HeartbeatMonitor, clock: Clock, seconds: float, *beats: Heartbeat) -> None:
    """Look four times a second, and hear beats at the end."""
    for _ in range(int(seconds * 4)):
        clock.now += 0.25
        pulses.look()
    for beat in beats:
        pulses.hear(beat)


def beat(rank: int, activity: str = "gen/Compute") -> Heartbeat:
    return Heartbeat(rank, 40 + rank, "here", activity)


def test_who_does_not_beat_is_named_with_what_it_was_at() -> None:
    clock = Clock()
    pulses = HeartbeatMonitor(3.0, clock)
    listened(pulses, clock, 1.0, beat(0), beat(1), beat(2))
    listened(pulses, clock, 3.0, beat(0))
    assert pulses.silent() == ()
    listened(pulses, clock, 0.5, beat(2))
    assert pulses.silent() == (1,)
    assert pulses.timeout_message((1,)) == (
        "worker 1 (host here, process 41) gives no sign of life for 3.5 s: its process is stopped, swapped out or "
        "cannot run; it was at gen/Compute"
    )
    assert pulses.report((7, 2, 0)) == (
        "\n  worker 0 (host here, process 40) is at gen/Compute\n  worker 2 (host here, process 42) is at gen/Compute"
    )


def test_who_was_never_heard_is_still_starting() -> None:
    clock = Clock()
    pulses = HeartbeatMonitor(3.0, clock)
    listened(pulses, clock, 100.0)
    assert pulses.silent() == ()


def test_a_master_that_does_not_listen_blames_nobody() -> None:
    clock = Clock()
    pulses = HeartbeatMonitor(3.0, clock)
    listened(pulses, clock, 1.0, beat(0))
    clock.now += 1000.0
    pulses.look()
    assert pulses.silent() == ()


def test_a_heart_beats_until_it_is_stopped() -> None:
    before = set(threading.enumerate())
    master = ZmqMaster(KEY, 1)
    worker = ZmqWorker(master.address, 0, KEY)
    heart = HeartbeatSender(worker, 0, 0.06, lambda: "this and that")
    words = [master.receive(5.0) for _ in range(3)]
    assert [isinstance(word, Heartbeat) and word.activity for word in words] == ["this and that"] * 3
    heart.stop()
    asleep = HeartbeatSender(worker, 0, 0.0, lambda: "")
    asleep.stop()
    assert set(threading.enumerate()) <= before
    worker.close()
    master.close()
