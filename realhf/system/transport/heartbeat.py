"""Heartbeats: a thread in every worker tells that its process lives and what it is at; the master notes who is silent.

A worker that waits in a collective goes on beating. One that is stopped, swapped out or holds the interpreter does not.
"""

import os
import socket
import threading
import time
from collections.abc import Callable, Iterable

from realhf.api.messages import Heartbeat
from realhf.system.transport.channel import ZmqWorker

BEATS = 6
"""Beats in the time after which silence is a failure."""

LONGEST_LOOK_S = 1.0
"""A master that does not listen for longer than this was busy itself: beats may wait for it."""

NAMED = 8
"""Workers of which a message tells what they do."""


class HeartbeatSender:
    """Beats from a thread of its own until it is stopped; ``timeout_s`` 0: not at all."""

    def __init__(self, channel: ZmqWorker, rank: int, timeout_s: float, activity: Callable[[], str]) -> None:
        pid, host = os.getpid(), socket.gethostname()
        self._stopped = threading.Event()
        self._thread = threading.Thread(
            target=channel.beat_until,
            args=(self._stopped, timeout_s / BEATS, lambda: Heartbeat(rank, pid, host, activity())),
            daemon=True,
        )
        if timeout_s > 0:
            self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join()


class HeartbeatMonitor:
    """Who was heard when, in seconds of listening, and what they were at."""

    def __init__(self, timeout_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.timeout_s = timeout_s
        self._clock = clock
        self._looked, self._listened = clock(), 0.0
        self._heard: dict[int, tuple[float, Heartbeat]] = {}  # the longest silent first

    def look(self) -> None:
        """Count the time since the last look as listened."""
        now = self._clock()
        self._listened += min(now - self._looked, LONGEST_LOOK_S)
        self._looked = now

    def hear(self, beat: Heartbeat) -> None:
        self.look()
        self._heard.pop(beat.rank, None)
        self._heard[beat.rank] = self._listened, beat

    def silent(self) -> tuple[int, ...]:
        """Return the workers that have beaten, but not for too long."""
        found = []
        for rank, (heard, _) in self._heard.items():
            if self._listened - heard <= self.timeout_s:
                break
            found.append(rank)
        return tuple(found)

    def timeout_message(self, ranks: Iterable[int]) -> str:
        """Say that workers are silent, and what they were at when they were last heard."""
        lines = [f"{self.place(rank)} gives no sign of life for {self._listened - self._heard[rank][0]:.1f} s: its "
                 f"process is stopped, swapped out or cannot run; it was at {self.words(rank)}"
                 for rank in sorted(ranks)]  # fmt: skip
        return "\n".join(lines[:NAMED])

    def report(self, ranks: Iterable[int]) -> str:
        """Say what workers are at, a line each."""
        lines = [f"  {self.place(rank)} is at {self.words(rank)}" for rank in sorted(ranks) if rank in self._heard]
        return "".join(f"\n{line}" for line in lines[:NAMED])

    def place(self, rank: int) -> str:
        beat = self._heard[rank][1]
        return f"worker {rank} (host {beat.host}, process {beat.pid})"

    def words(self, rank: int) -> str:
        return self._heard[rank][1].activity
