"""The master's ear: messages with deadlines, and the words for what went wrong when a worker dies or fails."""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from realhf.api.messages import Done, Failed, Heartbeat, Hello, Ready, ToMaster
from realhf.base.errors import RunFailed, WorkerTimeout
from realhf.system.transport.channel import MasterEnd, deadline
from realhf.system.transport.heartbeat import HeartbeatMonitor

POLL_S = 0.2
"""How often a waiting master looks whether its workers live."""

SETTLE_S = 1.5
"""How long a reported failure waits for a worse one: a worker that lost its peer may speak before the death shows."""

NODES_SETTLE_S = 6.0
"""The same where a node may be the cause: whoever keeps nodes hears of it later than their workers' peers do."""

AWAITED = (Done, Hello, Ready)
"""What a master waits for."""

LAST_LINES, LAST_BYTES = 20, 8192
"""What is shown of the log of a worker that died without a word."""


class NodeLostError(str):
    """The words for a worker that went with its node, or with what kept it: that is the cause, whatever it said."""


class Watch(Protocol):
    """Tells of workers that ended: rank and the words for how."""

    def __call__(self) -> dict[int, str]: ...


@dataclass(frozen=True)
class ReplyReceiver:
    """``activity(rank)`` says what a worker was asked for, ``log_of(rank)`` where it writes."""

    channel: MasterEnd
    watch: Watch
    activity: Callable[[int], str]
    log_of: Callable[[int], Any]
    settle_s: float = SETTLE_S
    nodes_settle_s: float = 0.0
    pulses: HeartbeatMonitor = field(default_factory=lambda: HeartbeatMonitor(float("inf")))

    def receive(
        self, left: Callable[[], float], complaint: Callable[[], str], awaited: Callable[[], Collection[int]]
    ) -> ToMaster:
        """Return the next message; ``RunFailed`` when a worker died or failed.

        ``Hung`` when one gives no sign of life for too long, or when the deadline passed for those ``awaited``.
        """
        patience = POLL_S
        while True:
            message = self.channel.receive(patience)
            if isinstance(message, AWAITED):  # nearly always: thousands of workers, microseconds each
                return message
            if message is None:
                self.pulses.look()
            match message:
                case Failed():
                    raise self._root_cause([message])
                case Heartbeat():
                    self.pulses.hear(message)
                case None if self.watch():
                    raise self._root_cause([])
                case None if silent := self.pulses.silent():
                    raise WorkerTimeout(self.pulses.timeout_message(silent), silent, lost=silent)
            if left() <= 0:
                raise WorkerTimeout(complaint() + self.pulses.report(awaited()), awaited())
            patience = min(POLL_S, left())

    def receive_all(self, kind: type, ranks: Iterable[int], timeout_s: float, what: str) -> dict[int, Any]:
        """Return one message of ``kind`` from every rank; ``what`` completes "waited for worker 1 ..."."""
        left, missing = deadline(timeout_s), set(ranks)
        found: dict[int, Any] = {}
        while missing:
            message = self.receive(
                left, lambda: f"waited {timeout_s:.0f} s for worker {listed(missing)} {what}", lambda: missing
            )
            if isinstance(message, kind):
                found[message.rank] = message
                missing.discard(message.rank)
        return found

    def _root_cause(self, reports: list[Failed]) -> RunFailed:
        """Listen on for a moment, then blame: who died without a word, else who failed first of its own accord."""
        soon, late = deadline(self.settle_s), deadline(max(self.settle_s, self.nodes_settle_s))
        silent: list[tuple[int, str]] = []
        while soon() > 0 or (late() > 0 and not silent and not any(report.user_error for report in reports)):
            message = self.channel.receive(0.1)
            if isinstance(message, Failed):
                reports.append(message)
            silent = silent_deaths(self.watch(), {report.rank for report in reports})
        if silent:
            rank, how = silent[0]
            log = self.log_of(rank)
            text = f"worker {rank} {how} while doing {self.activity(rank)}; see {log}{last_lines(Path(log))}"
            return RunFailed(text, lost=[rank for rank, _ in silent])
        report = next((r for r in reports if r.user_error), reports[0])
        text = f"worker {report.rank} failed during {report.during}: {report.error}"
        return RunFailed(
            f"{text}\nsee {self.log_of(report.rank)}", "" if report.user_error else report.traceback
        )  # fmt: skip


def silent_deaths(ended: Mapping[int, str], spoke: Collection[int]) -> list[tuple[int, str]]:
    """Return who ended and did not say why, with the words for how; those whose node was lost come first."""
    found = [(rank, how) for rank, how in ended.items() if rank not in spoke or isinstance(how, NodeLostError)]
    return sorted(found, key=lambda one: (not isinstance(one[1], NodeLostError), one[0]))


def listed(ranks: Iterable[int]) -> str:
    """Return ranks in words, a handful of them."""
    first, *rest = sorted(ranks)
    shown = [first, *rest[:15]]
    return ", ".join(map(str, shown)) + (f" and {len(rest) + 1 - len(shown)} more" if len(rest) >= len(shown) else "")


def last_lines(log: Path) -> str:
    """Return the end of a log, indented under a line that says so; nothing where there is none."""
    if not log.is_file():
        return ""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - LAST_BYTES))
        lines = file.read().decode(errors="replace").splitlines()[-LAST_LINES:]
    return "\n".join(["", "its last lines:", *(f"  {line}" for line in lines)]) if lines else ""
