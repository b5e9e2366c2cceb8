"""A torch.distributed backend that records the calls of one rank as events of NCCL's rules.

Ranks run one after the other in this process. What an earlier rank has sent or broadcast arrives; other receives leave
the tensor as it is, and reductions have the values of this rank alone. The order of the calls does not depend on them.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.gpu_emulated.nccl.rules import P2P, Collective, Communicator, Event, Post, Wait

BACKEND = "recording"


class RecordedWork(dist.Work):
    """A posted operation; an operation on a GPU may take any time, so it is not completed before ``wait``."""

    def __init__(self, events: list[Event], number: int) -> None:
        super().__init__()
        self.events, self.number = events, number

    def wait(self, timeout: Any = None) -> bool:
        self.events.append(Wait(self.number))
        return True

    def is_completed(self) -> bool:
        return False


@dataclass
class Recorder:
    """The events of every rank, and the data in flight."""

    events: dict[int, list[Event]] = field(default_factory=dict)
    data: dict[tuple, Tensor] = field(default_factory=dict)
    rank: int = 0
    batch: list[tuple[Communicator, P2P]] | None = None
    device: torch.device | None = None
    """Where NCCL needs every tensor; None: anywhere."""

    def check_device(self, name: str, *tensors: Tensor) -> None:
        found = [str(x.device) for x in tensors if self.device is not None and x.device != self.device]
        assert not found, f"rank {self.rank}: {name} of a tensor on {', '.join(found)}, NCCL needs {self.device}"

    def post(self, communicator: Communicator, operations: Sequence[P2P | Collective]) -> RecordedWork:
        events = self.events[self.rank]
        number = sum(isinstance(event, Post) for event in events)
        events.append(Post(number, communicator, tuple(operations)))
        return RecordedWork(events, number)

    def batch_isend_irecv(self, operations: list[dist.P2POp]) -> list[RecordedWork]:
        """Record a batch as torch's NCCL backend groups it: on the group's own communicator, with one work."""
        self.batch, batch = [], []
        for operation in operations:
            operation.op(operation.tensor, operation.peer, operation.group, operation.tag)
        batch, self.batch = self.batch, None
        group = batch[0][0]
        assert all(communicator == group for communicator, _ in batch)
        return [self.post(group, [message for _, message in batch])]

    @contextmanager
    def as_rank(self, rank: int, world: int) -> Iterator[None]:
        self.rank, self.events[rank] = rank, []
        dist.init_process_group(BACKEND, rank=rank, world_size=world, store=dist.HashStore())
        try:
            dist.barrier()  # as init_process_group of the workers
            yield
        finally:
            dist.destroy_process_group()


class RecordingGroup(dist.ProcessGroup):
    """A process group of the recording backend. Names of methods and arguments are torch's."""

    def __init__(self, recorder: Recorder, name: str, ranks: Sequence[int], group_rank: int) -> None:
        super().__init__(group_rank, len(ranks))
        self.recorder, self.name, self.members, self.index = recorder, name, tuple(ranks), group_rank
        self.counts: dict[tuple, int] = {}

    def size(self) -> int:
        return len(self.members)

    def rank(self) -> int:
        return self.index

    @property
    def group_name(self) -> str:
        return self.name

    def getBackendName(self) -> str:
        return BACKEND

    def _key(self, *what: Any) -> tuple:
        """Return the key of the data of the next such message."""
        count = self.counts[what] = self.counts.get(what, -1) + 1
        return (self.name, *what, count)

    def _message(self, is_send: bool, peer: int, tensor: Tensor) -> RecordedWork | None:
        rank, other = self.members[self.index], self.members[peer]
        self.recorder.check_device("send" if is_send else "recv", tensor)
        message = P2P(is_send, other, tensor.nbytes)
        if self.recorder.batch is not None:
            self.recorder.batch.append(((self.name, tuple(sorted(self.members))), message))
            return None
        return self.recorder.post((self.name, (min(rank, other), max(rank, other))), [message])

    def send(self, tensors: list[Tensor], dst: int, tag: int = 0) -> RecordedWork | None:
        self.recorder.data[self._key("message", self.index, dst)] = tensors[0].detach().clone()
        return self._message(True, dst, tensors[0])

    def recv(self, tensors: list[Tensor], src: int, tag: int = 0) -> RecordedWork | None:
        sent = self.recorder.data.pop(self._key("message", src, self.index), None)
        tensors[0].zero_() if sent is None else tensors[0].copy_(sent)
        return self._message(False, src, tensors[0])

    def _collective(self, name: str, tensor: Tensor) -> RecordedWork:
        if name != "barrier":
            self.recorder.check_device(name, tensor)
        return self.recorder.post((self.name, tuple(sorted(self.members))), [Collective(name, tensor.nbytes)])

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> RecordedWork:
        return self._collective("all_reduce", tensors[0])

    def reduce(self, tensors: list[Tensor], opts: Any = None) -> RecordedWork:
        return self._collective(f"reduce to {opts.rootRank}", tensors[0])

    def broadcast(self, tensors: list[Tensor], opts: Any) -> RecordedWork:
        key = self._key("broadcast", opts.rootRank)
        if opts.rootRank == self.index:
            self.recorder.data[key] = tensors[0].detach().clone()
        elif key in self.recorder.data:
            tensors[0].copy_(self.recorder.data[key])
        return self._collective("broadcast", tensors[0])

    def reduce_scatter_single(self, output: Tensor, whole: Tensor, opts: Any = None) -> RecordedWork:
        output.copy_(whole.chunk(self.size())[self.index].view_as(output))
        return self._collective("reduce_scatter", whole)

    def all_gather_single(self, whole: Tensor, part: Tensor, opts: Any = None) -> RecordedWork:
        for chunk in whole.chunk(self.size()):
            chunk.copy_(part.view_as(chunk))
        return self._collective("all_gather", whole)

    def all_to_all_single(
        self, output: Tensor, rows: Tensor, received: list[int], sent: list[int], opts: Any = None
    ) -> RecordedWork:
        """Numbers of rows differ between members, and are not those of the others here."""
        output.zero_()
        self.recorder.check_device("all_to_all", output, rows)
        return self.recorder.post((self.name, tuple(sorted(self.members))), [Collective("all_to_all", 0)])

    alltoall_base = all_to_all_single
    _reduce_scatter_base, _allgather_base = reduce_scatter_single, all_gather_single  # the names until torch 2.12

    def barrier(self, opts: Any = None) -> RecordedWork:
        return self._collective("barrier", torch.empty(0))


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    """A recorder, to which the backend of this process records."""
    made = Recorder()

    def create(options: Any, _: Any) -> RecordingGroup:
        ranks = options.global_ranks_in_group or range(options.group_size)
        return RecordingGroup(made, options.group_id, ranks, options.group_rank)

    dist.Backend.register_backend(BACKEND, create, extended_api=True, devices=["cpu"])
    monkeypatch.setattr(dist, "batch_isend_irecv", made.batch_isend_irecv)
    return made


Job = Callable[[int, int], None]


def record(recorder: Recorder, world: int, job: Job) -> list[list[Event]]:
    """Return the events of ``job(rank, world)`` on every rank. Ranks run in descending order, the last stage first."""
    recorder.events.clear()
    recorder.data.clear()
    for rank in reversed(range(world)):
        with recorder.as_rank(rank, world):
            job(rank, world)
    return [recorder.events[rank] for rank in range(world)]
