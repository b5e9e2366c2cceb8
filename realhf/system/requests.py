"""What the master has asked of workers."""

from collections.abc import Callable
from dataclasses import dataclass, field

from realhf.api.messages import Done
from realhf.plan.compile.schedule import RowsReady
from realhf.system.checkpoint.manifest import Rollout

OnReplies = Callable[[list[Done]], RowsReady | None]
"""Called with the non-empty replies to a request, by rank; may return an event."""


@dataclass
class WorkerRequest:
    name: str
    step: int
    mfc: str  # empty if the request is not of an MFC
    is_due: bytearray  # 1 for every worker whose reply is awaited, 0 for others
    n_due: int
    left: Callable[[], float]
    on_replies: OnReplies
    replies: list[Done] = field(default_factory=list)
    rollout: Rollout | None = None  # the results of a generating call, once complete

    @property
    def waiting(self) -> list[int]:
        return [rank for rank, is_due in enumerate(self.is_due) if is_due]

    def add(self, reply: Done) -> bool:
        """Add a reply; return True if it is the last. Empty ones, of which there are thousands, are not kept."""
        self.n_due -= self.is_due[reply.rank]
        self.is_due[reply.rank] = 0
        if not reply.is_empty:
            self.replies.append(reply)
        return not self.n_due
