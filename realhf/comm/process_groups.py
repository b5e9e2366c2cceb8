"""Process groups along the axes of a layout. They are passed explicitly; there is no global state."""

import datetime
import hmac
import ipaddress
import os
import secrets
import socket
import struct
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from realhf.api.layout import Coord, Layout
from realhf.base.activity import ActivityStack
from realhf.comm.p2p import DirectedGroups

TAG_BYTES = 32
LOOPBACK = "lo" if sys.platform == "linux" else "lo0"


def open_rendezvous(host: str, port: int, timeout_s: float) -> dist.TCPStore:
    """Open the rendezvous store on this machine; port 0 selects a free one. ValueError if the port is in use.

    It listens on ``host`` only: the socket is opened here because torch's own listens on all interfaces.
    """
    timeout = datetime.timedelta(seconds=timeout_s)
    try:
        listener = socket.create_server((host, port))
        port = listener.getsockname()[1]
        return dist.TCPStore(host, port, is_master=True, wait_for_workers=False, timeout=timeout,
                             master_listen_fd=listener.detach())  # fmt: skip
    except (OSError, RuntimeError) as error:
        raise ValueError(f"cannot open the rendezvous store on {host}:{port}: {error}") from error


class SignedStore(dist.Store):
    """Entries of a store, signed with ``key``: clients without it can delete entries, but not forge them.

    A store lists its names, so values are signed, too. Implements what gloo's groups need. ``get`` raises ValueError
    for a forged value.
    """

    def __init__(self, store: dist.TCPStore, key: bytes) -> None:
        super().__init__()
        self._store, self._key = store, key

    def _signed_name(self, name: str) -> str:
        return hmac.digest(self._key, b"name" + name.encode(), "sha256").hex()

    def _tag(self, name: str, value: bytes) -> bytes:
        return hmac.digest(self._key, b"value" + self._signed_name(name).encode() + value, "sha256")

    def set(self, name: str, value: bytes) -> None:  # type: ignore[override]  # torch passes and accepts bytes
        self._store.set(self._signed_name(name), self._tag(name, value) + value)  # type: ignore[arg-type]

    def get(self, name: str) -> bytes:
        data = self._store.get(self._signed_name(name))
        tag, value = data[:TAG_BYTES], data[TAG_BYTES:]
        if not hmac.compare_digest(tag, self._tag(name, value)):
            raise ValueError(f"the entry {name} of the rendezvous store is not signed with the key of this run")
        return value

    def wait(self, names: list[str], timeout: datetime.timedelta | None = None) -> None:
        self._store.wait([self._signed_name(name) for name in names], *filter(None, [timeout]))

    def check(self, names: list[str]) -> bool:
        return self._store.check([self._signed_name(name) for name in names])


def init_process_group(
    host: str, port: int, rank: int, world: int, device: str, timeout_s: float, store: dist.TCPStore | None, key: bytes
) -> dist.Store:
    """Create the default process group of the workers with ``key``; return its store, which later groups need.

    ``host`` is the IP address of the store. Collective; raises if a worker is missing at the timeout. Keep a reference
    to the store: torch does not keep its Python part alive.
    """
    timeout = datetime.timedelta(seconds=timeout_s)
    store = store or dist.TCPStore(host, port, is_master=False, timeout=timeout)
    backend = "nccl" if device == "cuda" else "gloo"
    if ipaddress.ip_address(host).is_loopback:
        os.environ["GLOO_SOCKET_IFNAME"] = LOOPBACK  # by default gloo listens on the address of the host name
    # NCCL's threads use the store without the GIL, and its own sockets check a random number
    group_store = SignedStore(store, key) if backend == "gloo" else store
    dist.init_process_group(backend, store=group_store, rank=rank, world_size=world, timeout=timeout)
    if backend == "gloo":
        tags = [hmac.digest(key, struct.pack("<4sII", b"peer", rank, peer), "sha256") for peer in range(world)]
        expected = [hmac.digest(key, struct.pack("<4sII", b"peer", peer, rank), "sha256") for peer in range(world)]
        verify_peers(_as_rows(tags), _as_rows(expected), None)
    dist.barrier()  # the first NCCL operation of a group needs all ranks; an exchange may not involve all
    return group_store


def _as_rows(tags: list[bytes]) -> Tensor:
    return torch.tensor([list(tag) for tag in tags], dtype=torch.uint8)


def verify_peers(own: Tensor, expected: Tensor, handle: dist.ProcessGroup | None) -> None:
    """Send row ``i`` of ``own`` to member ``i`` over the group's connections; ConnectionError for an unexpected reply.

    A process that connects to a rank's port first takes the place of another rank.
    """
    received = torch.empty_like(expected)
    dist.all_to_all_single(received, own.contiguous(), group=handle)
    if not torch.equal(received, expected):
        ranks = (received != expected).any(1).nonzero().flatten().tolist()
        raise ConnectionError(f"the connections to members {ranks} of a process group are not authenticated")


def destroy_process_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


ProcessGroup = dist.ProcessGroup
Ranks = tuple[int, ...]
LARGE_BYTES = 1 << 20
"""Size from which the copies inside gloo cost more than extra messages."""


class PendingCollective(NamedTuple):
    """A collective that has not completed on all of ``ranks``."""

    name: str
    nbytes: int
    ranks: Ranks

    def __str__(self) -> str:
        return f"{self.name} of {self.nbytes} bytes among ranks {', '.join(map(str, self.ranks))}"


class Group:
    """Collectives of some workers. In a group of one they are no-ops that do not call torch.distributed.

    ``index`` is this worker's rank in the group, -1 for non-members. Members are numbered in ascending order of rank,
    as torch.distributed does, even if ``ranks`` is not sorted (a mesh may be written 1,0).
    """

    def __init__(
        self, ranks: Ranks, rank: int, handle: ProcessGroup | None = None, activity: ActivityStack | None = None
    ) -> None:
        self.ranks, self.handle, self.activity = ranks, handle, activity or ActivityStack()
        self.size = len(ranks)
        self.index = sorted(ranks).index(rank) if rank in ranks else -1

    def torch_group(self) -> ProcessGroup:
        """Return the torch process group; a group of one creates its own on first use, without communication."""
        if self.handle is None:
            self.handle = dist.new_group(list(self.ranks), use_local_synchronization=True)
        return self.handle

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum over the group in place; return the tensor."""
        if self.size > 1:
            with self._activity("all_reduce", tensor):
                dist.all_reduce(tensor, group=self.handle)
        return tensor

    def all_max(self, tensor: Tensor) -> Tensor:
        """Take the element-wise maximum over the group in place; return the tensor."""
        if self.size > 1:
            with self._activity("all_max", tensor):
                dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self.handle)
        return tensor

    def broadcast(self, tensor: Tensor, index: int) -> Tensor:
        """Overwrite the tensor with that of member ``index``; return it."""
        if self.size > 1:
            with self._activity("broadcast", tensor):
                dist.broadcast(tensor, self.ranks[index], group=self.handle)
        return tensor

    def reduce_scatter(self, output: Tensor, whole: Tensor) -> None:
        """Fill ``output`` with this member's equal shard of the sum of ``whole`` over the group.

        ``output`` may be a view of that shard; ``whole`` is then overwritten.
        """
        if self.size > 1:
            with self._activity("reduce_scatter", whole):
                if self._is_gloo and output.data_ptr() == whole.chunk(self.size)[self.index].data_ptr():
                    dist.all_reduce(whole, group=self.handle)  # gloo's reduce-scatter does the same and copies twice
                else:
                    dist.reduce_scatter_tensor(output, whole, group=self.handle)
        elif output.data_ptr() != whole.data_ptr():
            output.copy_(whole)

    def all_to_all(self, output: Tensor, rows: Tensor, received: Sequence[int], sent: Sequence[int]) -> None:
        """Send ``sent[i]`` of ``rows`` to member i, and fill ``output`` with the ``received[i]`` rows of member i."""
        if self.size > 1:
            with self._activity("all_to_all", rows):
                dist.all_to_all_single(output, rows, [*received], [*sent], group=self.handle)
        else:
            output.copy_(rows)

    def start_reduce(self, tensor: Tensor, index: int) -> dist.Work:
        """Start to sum over the group in the memory of member ``index``; others lose their values. See ``wait``."""
        return _started(dist.reduce(tensor, sorted(self.ranks)[index], group=self.handle, async_op=True))

    def start_all_reduce(self, tensor: Tensor) -> dist.Work:
        """Start to sum over the group in place. See ``wait``."""
        return _started(dist.all_reduce(tensor, group=self.handle, async_op=True))

    def start_reduce_scatter(self, output: Tensor, whole: Tensor) -> dist.Work:
        """Start to fill ``output`` with this member's equal shard of the sum of ``whole`` over the group.

        ``output`` may be a view of that shard; ``whole`` is then overwritten.
        """
        if self._is_gloo and output.data_ptr() == whole.chunk(self.size)[self.index].data_ptr():
            return self.start_all_reduce(whole)
        return _started(dist.reduce_scatter_tensor(output, whole, group=self.handle, async_op=True))

    def start_all_gather(self, whole: Tensor, shard: Tensor) -> dist.Work:
        """Start to fill ``whole`` with the members' equal shards, ordered by ``index``."""
        return _started(dist.all_gather_into_tensor(whole.view(-1), shard.view(-1), group=self.handle, async_op=True))

    def wait(self, work: dist.Work, name: str, tensor: Tensor) -> None:
        """Wait until an operation on ``tensor`` has completed, on a GPU in its stream only."""
        with self._activity(name, tensor):
            work.wait()

    def all_gather(self, whole: Tensor, shard: Tensor) -> None:
        """Fill ``whole`` with the members' equal shards, ordered by ``index``; ``shard`` may be a view of its own."""
        if self.size > 1:
            with self._activity("all_gather", whole):
                self._all_gather(whole, shard)
        elif whole.data_ptr() != shard.data_ptr():
            whole.copy_(shard)

    def _all_gather(self, whole: Tensor, shard: Tensor) -> None:
        if not self._is_gloo or whole.nbytes < LARGE_BYTES:
            dist.all_gather_into_tensor(whole, shard, group=self.handle)
            return
        shards = whole.chunk(self.size)
        if shard.data_ptr() != shards[self.index].data_ptr():
            shards[self.index].copy_(shard)
        for rank, member_shard in zip(sorted(self.ranks), shards, strict=True):  # gloo's all-gather copies three times
            dist.broadcast(member_shard, rank, group=self.handle)

    @contextmanager
    def _activity(self, name: str, tensor: Tensor) -> Iterator[None]:
        """Enter a collective; RuntimeError names it, for example at its deadline."""
        pending = PendingCollective(name, tensor.nbytes, self.ranks)
        with self.activity.enter(pending):
            try:
                yield
            except RuntimeError as error:
                raise RuntimeError(f"{pending} failed: {error}") from error

    @property
    def _is_gloo(self) -> bool:
        return dist.get_backend(self.handle) == "gloo"


def _started(work: dist.Work | None) -> dist.Work:
    assert work is not None, "only members start collectives"
    return work


def all_gather_bytes(data: bytes) -> list[bytes]:
    """Return the bytes of every rank of the default group, which must be gloo; their lengths may differ."""
    lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(lengths, torch.tensor([len(data)]))
    longest = int(max(lengths))
    gathered = [torch.zeros(longest, dtype=torch.uint8) for _ in lengths]
    dist.all_gather(gathered, torch.tensor(list(data.ljust(longest, b"\0")), dtype=torch.uint8))
    return [bytes(part[:length].tolist()) for part, length in zip(gathered, map(int, lengths), strict=True)]


def make_groups(
    members: Iterable[Ranks], rank: int, activity: ActivityStack | None = None, timeout_s: float | None = None
) -> dict[Ranks, Group]:
    """Create process groups in the given order. Collective over ALL workers. ConnectionError for unauthenticated peers.

    Their operations have ``timeout_s``, else torch's default. Members of gloo groups prove their identity by random
    numbers that they exchange over the default group.
    """
    timeout = None if timeout_s is None else datetime.timedelta(seconds=timeout_s)
    groups = {ranks: Group(ranks, rank, dist.new_group(list(ranks), timeout=timeout), activity) for ranks in members}
    if groups and dist.get_backend() == "gloo":
        own = _as_rows([secrets.token_bytes(TAG_BYTES) for _ in range(dist.get_world_size())])
        expected = torch.empty_like(own)
        dist.all_to_all_single(expected, own)
        for group in groups.values():
            if group.index >= 0 and group.size > 1:
                verify_peers(own[sorted(group.ranks)], expected[sorted(group.ranks)], group.handle)
    return groups


@dataclass(frozen=True)
class ParallelContext:
    """One worker's coordinates in a layout, and its groups along the axes."""

    layout: Layout
    rank: int
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    groups: Mapping[Ranks, Group] = field(default_factory=dict)
    activity: ActivityStack = field(default_factory=ActivityStack)
    directed: DirectedGroups = DirectedGroups()

    @property
    def coord(self) -> Coord:
        return self.layout.coord(self.rank)

    def group(self, axis: str) -> Group:
        """Return this worker's group along an axis of the layout (``Layout.axis``)."""
        ranks = self.layout.axis(axis, self.rank)
        return self.groups[ranks] if len(ranks) > 1 else Group(ranks, self.rank)
