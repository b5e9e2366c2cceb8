"""Process groups and the place of this worker in them; passed to whoever needs it, never ambient."""

import datetime
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from realhf.api.layout import Coord, Layout
from realhf.base.activity import ActivityStack


def open_rendezvous(host: str, port: int, timeout_s: float) -> dist.TCPStore:
    """Open the rendezvous store on this machine; port 0 takes a free one. A taken port is a ``ValueError``."""
    try:
        return dist.TCPStore(
            host, port, is_master=True, wait_for_workers=False, timeout=datetime.timedelta(seconds=timeout_s)
        )
    except RuntimeError as error:
        raise ValueError(f"cannot open the rendezvous store on {host}:{port}: {error}") from error


def init_process_group(
    host: str, port: int, rank: int, world: int, device: str, timeout_s: float, store: dist.TCPStore | None
) -> None:
    """Join all workers in the default process group. Collective; raises when a worker is missing after the timeout."""
    timeout = datetime.timedelta(seconds=timeout_s)
    store = store or dist.TCPStore(host, port, is_master=False, timeout=timeout)
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timeout)
    dist.barrier()  # NCCL wants all ranks in the first operation of a group, and an exchange may concern only some


def destroy_process_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


ProcessGroup = dist.ProcessGroup
LARGE_BYTES = 1 << 20
"""From here on what gloo copies costs more than what it asks its peers."""


class PendingCollective(NamedTuple):
    """An operation that all of ``ranks`` must take part in."""

    name: str
    nbytes: int
    ranks: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.name} of {self.nbytes} bytes among ranks {', '.join(map(str, self.ranks))}"


class Group:
    """Some workers that reduce and gather together. A group of one does nothing, without torch.distributed.

    ``index`` is this worker's place among them, -1 outside. Members count by rank, whatever order ``ranks`` names them
    in (a mesh may be written 1,0): that is how torch.distributed numbers them.
    """

    def __init__(
        self,
        ranks: tuple[int, ...],
        rank: int,
        handle: dist.ProcessGroup | None = None,
        activity: ActivityStack | None = None,
    ) -> None:
        self.ranks, self.handle, self.activity = ranks, handle, activity or ActivityStack()
        self.size = len(ranks)
        self.index = sorted(ranks).index(rank) if rank in ranks else -1

    def of_torch(self) -> dist.ProcessGroup:
        """Return the group as torch.distributed knows it; a group of one makes it then, without asking others."""
        if self.handle is None:
            self.handle = dist.new_group(list(self.ranks), use_local_synchronization=True)
        return self.handle

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum in place over the group and return the tensor."""
        if self.size > 1:
            with self._at("all_reduce", tensor):
                dist.all_reduce(tensor, group=self.handle)
        return tensor

    def all_max(self, tensor: Tensor) -> Tensor:
        """Take the element-wise maximum in place over the group and return the tensor."""
        if self.size > 1:
            with self._at("all_max", tensor):
                dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self.handle)
        return tensor

    def broadcast(self, tensor: Tensor, index: int) -> Tensor:
        """Overwrite the tensor with that of member ``index`` and return it."""
        if self.size > 1:
            with self._at("broadcast", tensor):
                dist.broadcast(tensor, self.ranks[index], group=self.handle)
        return tensor

    def reduce_scatter(self, output: Tensor, whole: Tensor) -> None:
        """Fill ``output`` with this member's equal part of the sum of ``whole`` over the group.

        ``output`` may be that part of ``whole`` itself, which is then overwritten.
        """
        if self.size > 1:
            with self._at("reduce_scatter", whole):
                if self._is_gloo and output.data_ptr() == self._parts(whole)[self.index].data_ptr():
                    dist.all_reduce(whole, group=self.handle)  # gloo's reduce-scatter is the same with two copies more
                else:
                    dist.reduce_scatter_tensor(output, whole, group=self.handle)
        elif output.data_ptr() != whole.data_ptr():
            output.copy_(whole)

    def all_gather(self, whole: Tensor, part: Tensor) -> None:
        """Fill ``whole`` with the members' equal parts, in the order of ``index``; ``part`` may lie there already."""
        if self.size > 1:
            with self._at("all_gather", whole):
                self._all_gather(whole, part)
        elif whole.data_ptr() != part.data_ptr():
            whole.copy_(part)

    def _all_gather(self, whole: Tensor, part: Tensor) -> None:
        if not self._is_gloo or whole.nbytes < LARGE_BYTES:
            dist.all_gather_into_tensor(whole, part, group=self.handle)
            return
        parts = self._parts(whole)
        if part.data_ptr() != parts[self.index].data_ptr():
            parts[self.index].copy_(part)
        for rank, piece in zip(sorted(self.ranks), parts, strict=True):  # gloo's all-gather makes three copies
            dist.broadcast(piece, rank, group=self.handle)

    def _at(self, name: str, tensor: Tensor) -> AbstractContextManager[None]:
        return self.activity.enter(PendingCollective(name, tensor.nbytes, self.ranks))

    @property
    def _is_gloo(self) -> bool:
        return dist.get_backend(self.handle) == "gloo"

    def _parts(self, whole: Tensor) -> tuple[Tensor, ...]:
        """Return the equal parts of the members, as views."""
        return whole.chunk(self.size)


def make_groups(
    members: Iterable[tuple[int, ...]], rank: int, activity: ActivityStack | None = None
) -> dict[tuple[int, ...], Group]:
    """Create process groups in the order given. Collective over ALL workers; the only place that makes a group."""
    return {ranks: Group(ranks, rank, dist.new_group(list(ranks)), activity) for ranks in members}


@dataclass(frozen=True)
class ParallelContext:
    """One worker's place in one layout, with the groups along its axes."""

    layout: Layout
    rank: int
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    groups: Mapping[tuple[int, ...], Group] = field(default_factory=dict)
    activity: ActivityStack = field(default_factory=ActivityStack)

    @property
    def coord(self) -> Coord:
        return self.layout.coord(self.rank)

    def group(self, axis: str) -> Group:
        """Return the group along ``dp``, ``tp`` or ``pp`` that this worker is in."""
        ranks = self.layout.axis(axis, self.rank)
        return self.groups[ranks] if len(ranks) > 1 else Group(ranks, self.rank)
