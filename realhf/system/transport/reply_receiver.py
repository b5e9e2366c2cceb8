"""Receives the workers' messages with deadlines, and finds the root cause when workers die or fail."""

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from realhf.api.messages import Done, Failed, Heartbeat, Hello, Ready, ToMaster
from realhf.base.errors import RunFailed, WorkerTimeout
from realhf.system.transport.channel import MasterEnd, deadline
from realhf.system.transport.heartbeat import HeartbeatMonitor

POLL_S = 0.2
"""How often a waiting master checks that its workers are alive."""

GRACE_S = 1.5
"""Time after a reported failure in which a death may show: the peers of a dead worker fail before its exit is seen."""

NODE_GRACE_S = 6.0
"""The same on several nodes: a resource manager reports a lost node later than the peers of its workers fail."""

AWAITED = (Done, Hello, Ready)

LOG_LINES, LOG_BYTES = 20, 8192
"""The part of a dead worker's log that is shown."""

SEARCHED_BYTES = 1 << 18
"""The end of a log in which torch's report of a timeout is searched; stacks follow it."""
TIMED_OUT = re.compile(r"Watchdog caught collective operation timeout: WorkNCCL\((.*)\) ran for")


class NodeLoss(str):
    """How a worker ended that was lost with its node: the root cause, even if the worker reported a failure."""


@dataclass(frozen=True)
class ReplyReceiver:
    """``dead_workers()`` returns how workers ended, by rank; ``activity(rank)`` what was requested of a worker."""

    channel: MasterEnd
    dead_workers: Callable[[], dict[int, str]]
    activity: Callable[[int], str]
    log_of: Callable[[int], Any]
    record_of: Callable[[int], Path] | None = None
    grace_s: float = GRACE_S
    node_grace_s: float = 0.0
    heartbeats: HeartbeatMonitor = field(default_factory=lambda: HeartbeatMonitor(float("inf")))

    def receive(
        self, left: Callable[[], float], timeout_message: Callable[[], str], awaited: Callable[[], Collection[int]]
    ) -> ToMaster:
        """Return the next message.

        Raises ``RunFailed`` if a worker died or failed, and ``WorkerTimeout`` if one has no heartbeat or if the
        deadline has passed for ``awaited``.
        """
        timeout_s = POLL_S
        while True:
            message = self.channel.receive(timeout_s)
            if isinstance(message, AWAITED):  # first: the common case takes microseconds, for thousands of workers
                return message
            if message is None:
                self.heartbeats.tick()
            match message:
                case Failed():
                    raise self._root_cause([message])
                case Heartbeat():
                    self.heartbeats.record(message)
                case None if self.dead_workers():
                    raise self._root_cause([])
                case None if silent := self.heartbeats.timed_out():
                    raise WorkerTimeout(self.heartbeats.timeout_message(silent), silent, lost=silent)
            if left() <= 0:
                raise WorkerTimeout(timeout_message() + self.heartbeats.activities(awaited()), awaited())
            timeout_s = min(POLL_S, left())

    def receive_all(self, kind: type, ranks: Iterable[int], timeout_s: float, goal: str) -> dict[int, Any]:
        """Return one message of ``kind`` from every rank; ``goal`` completes "waited for worker 1 ..."."""
        left, missing = self.heartbeats.deadline(timeout_s), set(ranks)
        messages: dict[int, Any] = {}
        while missing:
            message = self.receive(
                left, lambda: f"waited {timeout_s:.0f} s for worker {format_ranks(missing)} {goal}", lambda: missing
            )
            if isinstance(message, kind):
                messages[message.rank] = message
                missing.discard(message.rank)
        return messages

    def _root_cause(self, reports: list[Failed]) -> RunFailed:
        """Wait for further reports and deaths; return the first death without a report, else the first failure."""
        left, node_left = deadline(self.grace_s), deadline(max(self.grace_s, self.node_grace_s))
        silent: list[tuple[int, str]] = []
        while left() > 0 or (node_left() > 0 and not silent and not any(report.user_error for report in reports)):
            message = self.channel.receive(0.1)
            if isinstance(message, Failed):
                reports.append(message)
            silent = silent_deaths(self.dead_workers(), {report.rank for report in reports})
        if silent:
            rank, ending = silent[0]
            log = self.log_of(rank)
            collective = timed_out_collective(Path(log), self.record_of(rank) if self.record_of else None)
            text = f"worker {rank} {ending} during {self.activity(rank)}; see {log}{collective}{log_tail(Path(log))}"
            return RunFailed(text, lost=[rank for rank, _ in silent])
        report = next((r for r in reports if r.user_error), reports[0])
        text = f"worker {report.rank} failed during {report.during}: {report.error}\nsee {self.log_of(report.rank)}"
        return RunFailed(text, "" if report.user_error else report.traceback)


def silent_deaths(ended: Mapping[int, str], reported: Collection[int]) -> list[tuple[int, str]]:
    """Return the workers that ended without a report, and how; those of lost nodes come first."""
    deaths = [(rank, how) for rank, how in ended.items() if rank not in reported or isinstance(how, NodeLoss)]
    return sorted(deaths, key=lambda death: (not isinstance(death[1], NodeLoss), death[0]))


def format_ranks(ranks: Iterable[int]) -> str:
    """Return at most 16 ranks and the number of the others."""
    ordered = sorted(ranks)
    more = f" and {len(ordered) - 16} more" if len(ordered) > 16 else ""
    return ", ".join(map(str, ordered[:16])) + more


def timed_out_collective(log: Path, record: Path | None) -> str:
    """Return a line on the operation that exceeded NCCL's deadline, as torch logged it; empty if none did."""
    found = TIMED_OUT.findall(end_of(log, SEARCHED_BYTES))
    if not found:
        return ""
    where = f", flight record {record} (torchfrtrace reads it)" if record is not None and record.is_file() else ""
    return f"\nthe NCCL operation {found[-1]} exceeded its deadline{where}"


def end_of(log: Path, nbytes: int) -> str:
    if not log.is_file():
        return ""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - nbytes))
        return file.read().decode(errors="replace")


def log_tail(log: Path) -> str:
    """Return the end of a log, indented under a title; empty if there is none."""
    lines = end_of(log, LOG_BYTES).splitlines()[-LOG_LINES:]
    return "\n".join(["", "its last lines:", *(f"  {line}" for line in lines)]) if lines else ""
