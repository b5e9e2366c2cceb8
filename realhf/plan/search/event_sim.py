"""Discrete-event simulation of workers with FIFO queues. Callers provide the operations and their costs."""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import chain
from math import inf

from realhf.api.machine import Cost


@dataclass(eq=False)
class Op:
    """One operation of a call on ``ranks`` (ascending). ``predecessor`` is the operation whose end let it start."""

    ranks: Sequence[int]
    cost: Cost
    tag: object = None
    start: float = 0.0
    end: float = 0.0
    predecessor: "Op | None" = None
    call: "CallOps" = field(init=False, repr=False)
    n_missing: int = field(init=False, repr=False)  # workers at which it is not at the head of the queue

    @property
    def cores(self) -> float:
        """Average number of busy cores at full speed."""
        return self.cost.core_seconds / self.cost.seconds if self.cost.seconds else 0.0


@dataclass(eq=False)
class CallOps:
    """All operations of one call. In a batch of calls, the first operation of every call precedes all others."""

    tag: object
    ops: Sequence[Op]
    n_unfinished: int = field(init=False, repr=False)
    last: Op = field(init=False, repr=False)  # the operation that ended last


Batches = Iterable[Sequence[CallOps]]  # batches of calls; the calls of one batch are sent together


class WorkerQueues:
    """The queues of all workers and the simulated time ``now``.

    An operation starts when it is at the head of the queue of each of its workers, and ends on all of them at once. If
    the running operations ask for more than the ``cores`` that all workers share (0: no sharing), all of them slow down
    in proportion. ``latency`` is the time in seconds until the master learns that a call has finished; calls that
    finish at the same time are reported in sending order.
    """

    def __init__(self, n_workers: int, cores: float = 0.0, latency: float = 0.0) -> None:
        self.now, self.latency, self.cores = 0.0, latency, cores
        self._queues: list[deque[Op]] = [deque() for _ in range(n_workers)]
        self._running: list[Op] = []
        self._speed = 1.0
        self._finished: list[tuple[float, int, CallOps]] = []
        self._numbers: dict[CallOps, int] = {}

    def run(self, batches: Batches, on_finished: Callable[[CallOps], Batches], until: float = inf) -> None:
        """Send the batches, and for every finished call those that ``on_finished`` returns, until all are done.

        The first call that finishes after ``until`` ends the simulation without a report.
        """
        self._send(batches, None)
        while (call := self._next_finished()) is not None and self.now <= until:
            self._send(on_finished(call), call.last)

    def _send(self, batches: Batches, predecessor: Op | None) -> None:
        for batch in batches:
            for call in batch:
                self._numbers[call] = len(self._numbers)
                call.n_unfinished = len(call.ops)
                for op in call.ops:
                    op.call, op.n_missing = call, len(op.ranks)
            for op in chain((call.ops[0] for call in batch), *(call.ops[1:] for call in batch)):
                for rank in op.ranks:
                    queue = self._queues[rank]
                    queue.append(op)
                    if queue[0] is op:
                        self._reach(op, predecessor)
        self._share_cores()

    def _reach(self, op: Op, predecessor: Op | None) -> None:
        op.n_missing -= 1
        if not op.n_missing:
            op.start, op.predecessor = self.now, predecessor
            op.end = self.now + op.cost.seconds / self._speed
            self._running.append(op)

    def _next_finished(self) -> CallOps | None:
        """Advance the time until the master learns of a finished call; None if no call is in flight."""
        while self._running:
            op = min(self._running, key=lambda o: o.end)
            if self._finished and self._finished[0][0] < op.end:
                break
            self._finish(op)
        if not self._finished:
            return None
        self.now, _, call = heappop(self._finished)
        return call

    def _finish(self, op: Op) -> None:
        self.now = op.end
        self._running.remove(op)
        for rank in op.ranks:
            queue = self._queues[rank]
            queue.popleft()
            if queue:
                self._reach(queue[0], op)
        call = op.call
        call.n_unfinished -= 1
        if not call.n_unfinished:
            call.last = op
            heappush(self._finished, (self.now + self.latency, self._numbers[call], call))
        self._share_cores()

    def _share_cores(self) -> None:
        if not self.cores:
            return
        wanted = 0.0
        for op in self._running:  # plain addition as in C++; sum() is compensated in recent versions of Python
            wanted += op.cores
        speed = min(1.0, self.cores / wanted) if wanted else 1.0
        if speed != self._speed:
            for op in self._running:
                op.end = self.now + (op.end - self.now) * self._speed / speed
            self._speed = speed
