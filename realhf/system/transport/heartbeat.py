"""Heartbeats: a thread of every worker reports that its process runs, and its activity; the master monitors them.

A worker that waits in a collective sends heartbeats. One that is stopped, swapped out or holds the GIL does not.
"""

import os
import socket
import threading
import time
from collections.abc import Callable, Iterable
from itertools import takewhile

from realhf.api.messages import Heartbeat
from realhf.system.transport.channel import ZmqWorker

HEARTBEATS_PER_TIMEOUT = 6

MAX_TICK_S = 1.0
"""A master that did not receive for longer was busy: heartbeats may be queued."""

MAX_LISTED = 8
"""Workers listed in a message."""


class HeartbeatSender:
    """Sends heartbeats from a separate thread until it is stopped; ``timeout_s`` 0 disables them."""

    def __init__(self, channel: ZmqWorker, rank: int, timeout_s: float, activity: Callable[[], str]) -> None:
        pid, host = os.getpid(), socket.gethostname()
        self._stopped = threading.Event()
        self._thread = threading.Thread(
            target=channel.send_heartbeats,
            args=(self._stopped, timeout_s / HEARTBEATS_PER_TIMEOUT, lambda: Heartbeat(rank, pid, host, activity())),
            daemon=True,
        )
        if timeout_s > 0:
            self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join()


class HeartbeatMonitor:
    """The last heartbeat of every worker, timed by the seconds for which the master was receiving."""

    def __init__(self, timeout_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.timeout_s = timeout_s
        self._clock = clock
        self._last_tick, self._seconds = clock(), 0.0
        self._last: dict[int, tuple[float, Heartbeat]] = {}  # oldest first

    def tick(self) -> None:
        """Count the time since the last tick, up to ``MAX_TICK_S``."""
        now = self._clock()
        self._seconds += min(now - self._last_tick, MAX_TICK_S)
        self._last_tick = now

    def deadline(self, seconds: float) -> Callable[[], float]:
        """Return a function that returns the seconds left, without those in which the master was not receiving."""
        end = self._seconds + seconds
        return lambda: end - self._seconds

    def record(self, heartbeat: Heartbeat) -> None:
        self.tick()
        self._last.pop(heartbeat.rank, None)
        self._last[heartbeat.rank] = self._seconds, heartbeat

    def timed_out(self) -> tuple[int, ...]:
        """Return the workers whose last heartbeat is too old. Workers without one are still starting."""
        return tuple(takewhile(lambda rank: self._seconds - self._last[rank][0] > self.timeout_s, self._last))

    def timeout_message(self, ranks: Iterable[int]) -> str:
        lines = [f"{self._describe(rank)}: no heartbeat for {self._seconds - self._last[rank][0]:.1f} s: its process "
                 f"is stopped, swapped out or blocked; last activity: {self._last[rank][1].activity}"
                 for rank in sorted(ranks)]  # fmt: skip
        return "\n".join(lines[:MAX_LISTED])

    def activities(self, ranks: Iterable[int]) -> str:
        """Return a line for every worker with its activity."""
        lines = [f"\n  {self._describe(rank)}: {self._last[rank][1].activity}" for rank in sorted(ranks)
                 if rank in self._last]  # fmt: skip
        return "".join(lines[:MAX_LISTED])

    def _describe(self, rank: int) -> str:
        heartbeat = self._last[rank][1]
        return f"worker {rank} (host {heartbeat.host}, process {heartbeat.pid})"
