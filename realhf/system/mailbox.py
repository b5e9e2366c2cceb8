"""The master's ear: messages with deadlines, and the words for what went wrong when a worker dies or fails."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from realhf.api.messages import Failed, ToMaster
from realhf.base.errors import RunFailed
from realhf.system.channel import MasterEnd, deadline

POLL_S = 0.2
"""How often a waiting master looks whether its workers live."""

SETTLE_S = 1.5
"""How long a reported failure waits for a worse one: a worker that lost its peer may speak before the death shows."""


class Watch(Protocol):
    """Tells of workers that ended: rank and the words for how."""

    def __call__(self) -> dict[int, str]: ...


@dataclass(frozen=True)
class Mailbox:
    """``doing(rank)`` says what a worker was asked for, ``log_of(rank)`` where it writes."""

    channel: MasterEnd
    watch: Watch
    doing: Callable[[int], str]
    log_of: Callable[[int], Any]
    settle_s: float = SETTLE_S

    def receive(self, left: Callable[[], float], complaint: Callable[[], str]) -> ToMaster:
        """Return the next message; ``RunFailed`` when a worker died or failed, or the deadline passed."""
        while True:
            message = self.channel.receive(min(POLL_S, max(left(), 0.0)))
            if isinstance(message, Failed):
                raise self._first_cause([message])
            if message is not None:
                return message
            if self.watch():
                raise self._first_cause([])
            if left() <= 0:
                raise RunFailed(complaint())

    def receive_all(self, kind: type, ranks: Iterable[int], timeout_s: float, what: str) -> dict[int, Any]:
        """Return one message of ``kind`` from every rank; ``what`` completes "waited for worker 1 ..."."""
        left, missing = deadline(timeout_s), set(ranks)
        found: dict[int, Any] = {}
        while missing:
            message = self.receive(
                left, lambda: f"waited {timeout_s:.0f} s for worker {', '.join(map(str, sorted(missing)))} {what}"
            )
            if isinstance(message, kind):
                found[message.rank] = message
                missing.discard(message.rank)
        return found

    def _first_cause(self, reports: list[Failed]) -> RunFailed:
        """Listen on for a moment, then blame: who died without a word, else who failed first of its own accord."""
        left = deadline(self.settle_s)
        while left() > 0:
            message = self.channel.receive(0.1)
            if isinstance(message, Failed):
                reports.append(message)
        spoke = {report.rank for report in reports}
        silent = sorted((rank, how) for rank, how in self.watch().items() if rank not in spoke)
        if silent:
            rank, how = silent[0]
            return RunFailed(f"worker {rank} {how} while doing {self.doing(rank)}; see {self.log_of(rank)}")
        report = next((r for r in reports if r.user_error), reports[0])
        text = f"worker {report.rank} failed during {report.during}: {report.error}"
        return RunFailed(
            f"{text}\nsee {self.log_of(report.rank)}", "" if report.user_error else report.traceback
        )  # fmt: skip
