"""NCCL's ordering rules, applied to the operations that ranks post. Durations, bandwidth and memory are left out.

1. A communicator executes the operations of a rank one after the other, in the order in which the rank posted them.
2. A send and its receive complete together, when both are at the heads of their ranks' queues of the communicator.
   The operations of one batch are at the head together.
3. A collective completes when it is at the head of the queue of every member. All members must call the same one.
4. A communicator is created at its first operation, which blocks every member until all members have arrived.
5. After waiting for an operation, a rank posts nothing until it has completed: on a GPU, later operations of the stream
   start after it.

Rule 5 makes the host wait where only its stream would, so no order that passes depends on the host running ahead.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

Communicator = tuple[str, tuple[int, ...]]
"""The name of a torch process group, and the global ranks of the communicator, in ascending order."""


@dataclass(frozen=True)
class P2P:
    """A send or a receive."""

    is_send: bool
    peer: int
    nbytes: int

    def __str__(self) -> str:
        return f"{'send to' if self.is_send else 'receive from'} {self.peer} of {self.nbytes} bytes"


@dataclass(frozen=True)
class Collective:
    name: str
    nbytes: int

    def __str__(self) -> str:
        return f"{self.name} of {self.nbytes} bytes"


@dataclass(frozen=True)
class Post:
    """Operations that a rank posts at once: one collective, one message, or a batch of messages."""

    number: int
    communicator: Communicator
    operations: tuple[P2P | Collective, ...]

    def __str__(self) -> str:
        group, ranks = self.communicator
        return f"{' and '.join(map(str, self.operations))} (group {group}, ranks {', '.join(map(str, ranks))})"


@dataclass(frozen=True)
class Wait:
    """The rank waits for the operations of a ``Post``."""

    number: int


Event = Post | Wait


class OrderError(AssertionError):
    """Ranks block one another, or call different operations."""


class _Queue:
    """The operations that a rank has posted on a communicator and that have not completed."""

    def __init__(self) -> None:
        self.posts: deque[tuple[Post, list[P2P | Collective]]] = deque()

    @property
    def head(self) -> list[P2P | Collective]:
        return self.posts[0][1] if self.posts else []


class Machine:
    """Executes the events of all ranks; the result does not depend on the order in which ranks advance."""

    def __init__(self, programs: Sequence[Sequence[Event]]) -> None:
        self.programs = programs
        self.at = [0] * len(programs)
        self.completed: list[set[int]] = [set() for _ in programs]
        self.queues: dict[tuple[Communicator, int], _Queue] = {}
        self.arrived: dict[Communicator, set[int]] = {}
        self.pairs: set[tuple[int, int]] = set()
        """Ranks that have exchanged a message."""

    def run(self) -> None:
        """Execute everything; ``OrderError`` says what every blocked rank waits for."""
        changed: set[Communicator] = set()
        while any(self._advance(rank, changed) for rank in range(len(self.programs))):
            while changed:
                self._execute(changed.pop())
        blocked = [self._blocked(rank) for rank in range(len(self.programs)) if self._has_more(rank)]
        if blocked:
            raise OrderError("ranks block one another:\n" + "\n".join(blocked))
        if left := [str(post) for queue in self.queues.values() for post, _ in queue.posts]:
            raise OrderError("never completed:\n" + "\n".join(left))

    def _has_more(self, rank: int) -> bool:
        return self.at[rank] < len(self.programs[rank])

    def _advance(self, rank: int, changed: set[Communicator]) -> bool:
        """Execute the events of a rank until it blocks; return True if it executed any or has arrived somewhere."""
        moved = False
        while self._has_more(rank):
            event = self.programs[rank][self.at[rank]]
            if isinstance(event, Wait):
                if event.number not in self.completed[rank]:
                    break
            else:
                arrived = self.arrived.setdefault(event.communicator, set())
                moved |= rank not in arrived
                arrived.add(rank)
                if arrived != set(event.communicator[1]):
                    break
                queue = self.queues.setdefault((event.communicator, rank), _Queue())
                queue.posts.append((event, list(event.operations)))
                changed.add(event.communicator)
            self.at[rank] += 1
            moved = True
        return moved

    def _execute(self, communicator: Communicator) -> None:
        """Complete what can complete on a communicator."""
        members = communicator[1]
        while self._execute_collective(communicator) or any(
            self._execute_messages(communicator, rank) for rank in members
        ):
            pass

    def _execute_collective(self, communicator: Communicator) -> bool:
        members = communicator[1]
        heads = [self.queues.get((communicator, rank), _Queue()).head for rank in members]
        calls = {head[0] for head in heads if head and isinstance(head[0], Collective)}
        if len(calls) > 1:
            raise OrderError(f"ranks {members} call different collectives: {', '.join(map(str, calls))}")
        if not calls or not all(head and isinstance(head[0], Collective) for head in heads):
            return False
        for rank in members:
            self._complete(communicator, rank, heads[members.index(rank)][0])
        return True

    def _execute_messages(self, communicator: Communicator, rank: int) -> bool:
        """Complete the sends at the head of a rank's queue whose receives are at the head of the peer's."""
        done = False
        for send in [op for op in self._head(communicator, rank) if isinstance(op, P2P) and op.is_send]:
            for receive in self._head(communicator, send.peer):
                if isinstance(receive, P2P) and not receive.is_send and receive.peer == rank:
                    if receive.nbytes != send.nbytes:
                        raise OrderError(f"rank {rank} has {send}, rank {send.peer} has {receive}")
                    self._complete(communicator, rank, send)
                    self._complete(communicator, send.peer, receive)
                    self.pairs.add((min(rank, send.peer), max(rank, send.peer)))
                    done = True
                    break
        return done

    def _head(self, communicator: Communicator, rank: int) -> list[P2P | Collective]:
        return list(self.queues.get((communicator, rank), _Queue()).head)

    def _complete(self, communicator: Communicator, rank: int, operation: P2P | Collective) -> None:
        posts = self.queues[communicator, rank].posts
        post, remaining = posts[0]
        remaining.remove(operation)
        if not remaining:
            posts.popleft()
            self.completed[rank].add(post.number)

    def _blocked(self, rank: int) -> str:
        event = self.programs[rank][self.at[rank]]
        if isinstance(event, Post):
            return f"rank {rank} creates the communicator of {event}"
        post = next(p for p in self.programs[rank] if isinstance(p, Post) and p.number == event.number)
        head = self.queues[post.communicator, rank].posts[0][0]
        return f"rank {rank} waits for {post}, behind {head}" if head is not post else f"rank {rank} waits for {post}"
