"""Workers that carry out their inboxes in order, under a clock. Who sends what, and its price, are the caller's.

A job starts when all its workers have reached it and ends for all of them together. Where workers share cores, jobs
that ask for more cores together than there are all run slower in proportion.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

from realhf.api.machine import Cost


@dataclass(eq=False)
class Op:
    """One instruction of a call on ``ranks``, ascending. ``cause`` is the job whose end let this one start."""

    ranks: Sequence[int]
    cost: Cost
    tag: object = None
    start: float = 0.0
    end: float = 0.0
    predecessor: "Op | None" = None
    call: "CallOps" = field(init=False, repr=False)
    n_missing: int = field(init=False, repr=False)  # workers that have not reached it

    @property
    def cores(self) -> float:
        """Cores that it keeps busy when it runs at full speed."""
        return self.cost.core_seconds / self.cost.seconds if self.cost.seconds else 0.0


@dataclass(eq=False)
class CallOps:
    """All jobs of one call. Of calls that are sent together, the ``first`` jobs of all go before the rest of any."""

    tag: object
    first: Sequence[Op]
    rest: Sequence[Op]
    n_unfinished: int = field(init=False, repr=False)
    last: Op = field(init=False, repr=False)  # the job that ended last

    @property
    def ops(self) -> tuple[Op, ...]:
        return (*self.first, *self.rest)


Batches = Iterable[Sequence[CallOps]]
"""Orders; those of one batch are sent together."""


class WorkerQueues:
    """``cores`` are those of all workers together (0: every worker has its own); ``latency`` seconds to hear of an end.

    Orders whose ends are heard of at the same time are answered in the order in which they were sent.
    """

    def __init__(self, n_workers: int, cores: float = 0.0, latency: float = 0.0) -> None:
        self.now, self.latency, self.cores = 0.0, latency, cores
        self._inboxes: list[deque[Op]] = [deque() for _ in range(n_workers)]
        self._running: list[Op] = []
        self._speed = 1.0
        self._over: list[tuple[float, int, CallOps]] = []
        self._numbers: dict[CallOps, int] = {}

    def run(self, batches: Batches, answer: Callable[[CallOps], Batches]) -> None:
        """Send the batches, and for every order that is over what ``answer`` wants sent then, until all is done."""
        self._send(batches, None)
        while (order := self._next_over()) is not None:
            self._send(answer(order), order.last)

    def _send(self, batches: Batches, cause: Op | None) -> None:
        for batch in batches:
            for order in batch:
                self._numbers[order] = len(self._numbers)
                order.n_unfinished = len(order.first) + len(order.rest)
            for order in batch:
                self._enqueue(order, order.first, cause)
            for order in batch:
                self._enqueue(order, order.rest, cause)
        self._share_cores()

    def _enqueue(self, order: CallOps, jobs: Sequence[Op], cause: Op | None) -> None:
        for job in jobs:
            job.call, job.n_missing = order, len(job.ranks)
            for rank in job.ranks:
                inbox = self._inboxes[rank]
                inbox.append(job)
                if inbox[0] is job:
                    self._reach(job, cause)

    def _reach(self, job: Op, cause: Op | None) -> None:
        job.n_missing -= 1
        if not job.n_missing:
            job.start, job.predecessor = self.now, cause
            job.end = self.now + job.cost.seconds / self._speed
            self._running.append(job)

    def _next_over(self) -> CallOps | None:
        """Let time pass until the master hears that an order is over; None when nothing is under way."""
        while self._running:
            job = min(self._running, key=lambda j: j.end)
            if self._over and self._over[0][0] < job.end:
                break
            self._finish(job)
        if not self._over:
            return None
        self.now, _, order = heappop(self._over)
        return order

    def _finish(self, job: Op) -> None:
        self.now = job.end
        self._running.remove(job)
        for rank in job.ranks:
            inbox = self._inboxes[rank]
            inbox.popleft()
            if inbox:
                self._reach(inbox[0], job)
        order = job.call
        order.n_unfinished -= 1
        if not order.n_unfinished:
            order.last = job
            heappush(self._over, (self.now + self.latency, self._numbers[order], order))
        self._share_cores()

    def _share_cores(self) -> None:
        """Set the speed of all running jobs to what the cores allow, and their ends accordingly."""
        if not self.cores:
            return
        wanted = 0.0
        for job in self._running:  # one after the other, as in C++: sum() of newer Pythons rounds otherwise
            wanted += job.cores
        speed = min(1.0, self.cores / wanted) if wanted else 1.0
        if speed != self._speed:
            for job in self._running:
                job.end = self.now + (job.end - self.now) * self._speed / speed
            self._speed = speed
