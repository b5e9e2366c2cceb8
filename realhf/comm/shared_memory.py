"""Shared memory between the workers of one host: each sender has a small ring of slots that all its receivers map.

A slot is filled once, whoever many it is for, announced over a socket, emptied by each receiver and given back. The
ring stays in the processor's cache. Memory and sockets have no name in any file system and vanish with the processes.
"""

import contextlib
import mmap
import os
import secrets
import select
import socket
import struct
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from realhf.base.activity import ActivityStack
from realhf.comm.packets import Packet
from realhf.plan.cost.traffic import N_SLOTS, RING_BYTES, SLOT_BYTES

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

MESSAGE = struct.Struct("<BxHI")
"""What happened to a slot (FILLED, EMPTIED), its number, and the bytes in it."""
FILLED, EMPTIED = 1, 2


class SharedMemoryPeers:
    """This rank's links to those workers of its host that it shares memory with, none at first.

    ``peers`` are their ranks. ``why_not`` tells why memory is not shared with other workers of this host, if any.
    ``hosts`` names the host of each rank, anywhere, that shares memory with all others there.
    """

    def __init__(self, rank: int, timeout_s: float, activity: ActivityStack | None = None) -> None:
        self.rank, self.timeout_s, self.why_not, self.activity = rank, timeout_s, "", activity or ActivityStack()
        self.hosts: dict[int, str] = {}
        self._sockets: dict[int, socket.socket] = {}
        self._poll = select.poll()
        self._rank_of: dict[int, int] = {}
        self._rings: dict[int, Tensor] = {}  # by sender, [N_SLOTS, SLOT_BYTES] uint8
        self._readers: list[set[int]] = [set() for _ in range(N_SLOTS)]  # who has yet to empty my own ring's slots
        self._filled: dict[int, deque[tuple[int, int]]] = {}  # by sender: slots and sizes not yet looked at
        self._gone: set[int] = set()

    @property
    def peers(self) -> frozenset[int]:
        return frozenset(self._sockets)

    def share(self, ring: int) -> None:
        """Use the memory of file descriptor ``ring`` as this rank's own."""
        self._rings[self.rank] = _map(ring)

    def add_peer(self, peer: int, wire: socket.socket, ring: int) -> None:
        """Take up a connected peer and the descriptor of its ring, which is closed."""
        wire.settimeout(self.timeout_s)
        self._sockets[peer], self._filled[peer], self._rings[peer] = wire, deque(), _map(ring)
        os.close(ring)
        self._rank_of[wire.fileno()] = peer
        self._poll.register(wire, select.POLLIN)

    def run(
        self,
        outgoing: Iterable[Packet],
        incoming: Mapping[int, Iterable[Packet]],
        pack: Callable[[Packet, Tensor], None],
        unpack: Callable[[Packet, Tensor], None],
        meanwhile: Iterator[object],
    ) -> None:
        """Send and receive, each sender's parcels in their order, until all have left and all are here.

        Where there is nothing to do but to wait, the next item of ``meanwhile`` is taken, as long as there are any.
        TimeoutError when nothing happens for ``timeout_s``, ConnectionError when a peer ends before it has done its
        part; both name what was awaited. After an error the links are of no more use.
        """
        leaving = iter(outgoing)
        coming = {peer: iter(parcels) for peer, parcels in incoming.items()}
        due = {peer: parcel for peer, parcels in coming.items() if (parcel := next(parcels, None)) is not None}
        ready = next(leaving, None)
        while ready is not None or due:
            idle = True
            if ready is not None and set() in self._readers:
                self._send(ready, pack)
                ready, idle = next(leaving, None), False
            for peer in [peer for peer in due if self._filled[peer]]:
                self._receive(peer, due.pop(peer), unpack)
                idle = False
                if (parcel := next(coming[peer], None)) is not None:
                    due[peer] = parcel
            if idle and not self._poll_events(0.0, ready, due) and next(meanwhile, None) is None:
                with self.activity.enter(self._awaited(ready, due)):
                    self._poll_events(self.timeout_s, ready, due)
            elif not idle:
                self._poll_events(0.0, ready, due)

    def close(self) -> None:
        """Cut the links; what peers have not read yet they can still read."""
        for wire in self._sockets.values():
            wire.close()
        self._sockets, self._rings = {}, {}

    def _send(self, parcel: Packet, pack: Callable[[Packet, Tensor], None]) -> None:
        slot = self._readers.index(set())
        pack(parcel, self._rings[self.rank][slot])
        self._readers[slot].update(parcel.to)
        for peer in parcel.to:
            self._notify(peer, FILLED, slot, parcel.nbytes)

    def _receive(self, peer: int, parcel: Packet, unpack: Callable[[Packet, Tensor], None]) -> None:
        slot, nbytes = self._filled[peer].popleft()
        if nbytes != parcel.nbytes:
            raise RuntimeError(f"rank {peer} sent {nbytes} bytes where rank {self.rank} expects {parcel.nbytes}: they "
                               "were given different moves")  # fmt: skip
        unpack(parcel, self._rings[peer][slot])
        self._notify(peer, EMPTIED, slot, nbytes)

    def _notify(self, peer: int, event: int, slot: int, nbytes: int) -> None:
        try:
            self._sockets[peer].send(MESSAGE.pack(event, slot, nbytes))
        except (BrokenPipeError, ConnectionResetError):
            self._gone.add(peer)  # matters only to those who wait for it

    def _poll_events(self, wait_s: float, ready: Packet | None, due: Mapping[int, Packet]) -> bool:
        """Read the messages that are there, waiting for the first up to ``wait_s``; tell whether there were any."""
        needed = set(due).union(*self._readers if ready else ())
        if wait_s and self._gone & needed:
            raise ConnectionError(f"a worker ended while {self._awaited(ready, due)}")
        events = self._poll.poll(wait_s * 1000)
        if wait_s and not events:
            raise TimeoutError(f"nothing happened for {wait_s:g} s while {self._awaited(ready, due)}")
        for number, _ in events:
            self._read_event(self._rank_of[number])
        return bool(events)

    def _read_event(self, peer: int) -> None:
        try:
            message = self._sockets[peer].recv(MESSAGE.size)
        except ConnectionResetError:
            return  # the peer ended without hearing all that it was told; what it said before can still be read
        if not message:
            self._gone.add(peer)
            self._poll.unregister(self._sockets[peer])
            return
        event, slot, nbytes = MESSAGE.unpack(message)
        if event == FILLED:
            self._filled[peer].append((slot, nbytes))
        else:
            self._readers[slot].discard(peer)

    def _awaited(self, ready: Packet | None, due: Mapping[int, Packet]) -> str:
        awaited = [f"{parcel} from rank {peer}" for peer, parcel in due.items()]
        if ready is not None:
            awaited.append(f"ranks {sorted(set().union(*self._readers))} to empty memory for {ready} to {ready.to}")
        ended = f" (ended: {sorted(self._gone)})" if self._gone else ""
        return f"rank {self.rank} awaited {' and '.join(awaited)}{ended}"


def _map(ring: int) -> Tensor:
    memory = mmap.mmap(ring, RING_BYTES)
    return torch.frombuffer(memory, dtype=torch.uint8).view(N_SLOTS, SLOT_BYTES)


def open_shared_memory_peers(
    rank: int, world: int, timeout_s: float, hosts: tuple[str, ...] | None = None, activity: ActivityStack | None = None
) -> SharedMemoryPeers:
    """Link all workers that share a host. Collective over the default group, which must be gloo.

    ``hosts`` names the host of each rank; without it the operating system is asked. Where two workers of a host cannot
    share memory nobody there does, ``why_not`` tells the reason, and ``exchange`` takes the network.
    """
    links = SharedMemoryPeers(rank, timeout_s, activity)
    mine = hosts[rank] if hosts else f"{socket.gethostname()} {BOOT_ID.read_text() if BOOT_ID.exists() else ''}"
    with contextlib.ExitStack() as stack:
        reason, ring, door = "", None, None
        try:
            ring = _new_ring()
            stack.callback(os.close, ring)
            door = stack.enter_context(_new_listener(world, timeout_s))
        except OSError as error:
            reason = f"rank {rank}: {error}"
        known = _gather((mine, reason, door.getsockname() if door else b""), world)
        near = [peer for peer, (host, _, _) in enumerate(known) if host == mine]
        reasons = [known[peer][1] for peer in near if known[peer][1]]
        called: dict[int, socket.socket] = {}
        if not reasons and ring is not None:
            called, reason = _call({peer: known[peer][2] for peer in near if peer < rank}, rank, ring, timeout_s)
        refused = _gather((reason,), world)
        without = {host for (host, no_ring, _), (no_call,) in zip(known, refused, strict=True) if no_ring or no_call}
        links.hosts = {peer: host for peer, (host, _, _) in enumerate(known) if host not in without}
        reasons = reasons or [refused[peer][0] for peer in near if refused[peer][0]]
        if reasons or ring is None or door is None:
            for wire in called.values():
                wire.close()
            links.why_not = reasons[0]
            return links
        links.share(ring)
        for peer, wire, their_ring in _answer(door, sum(peer > rank for peer in near), rank, ring):
            links.add_peer(peer, wire, their_ring)
        for peer, wire in called.items():
            links.add_peer(peer, wire, _hello(wire)[1])
    return links


def _gather(value: tuple, world: int) -> list[tuple]:
    values: list[tuple] = [value] * world
    if world > 1:
        dist.all_gather_object(values, value)
    return values


def _new_ring() -> int:
    if sys.platform != "linux":
        raise OSError(f"needs Linux, this is {sys.platform}")
    ring = os.memfd_create("realhf-ring")
    os.posix_fallocate(ring, 0, RING_BYTES)  # an error now instead of a fault at the first write
    return ring


def _new_listener(world: int, timeout_s: float) -> socket.socket:
    door = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    door.bind(b"\0realhf-" + secrets.token_hex(16).encode())  # an abstract address: no file
    door.listen(world)
    door.settimeout(timeout_s)
    return door


def _call(doors: Mapping[int, bytes], rank: int, ring: int, timeout_s: float) -> tuple[dict[int, socket.socket], str]:
    """Connect to peers and hand each the ring; the first that cannot be reached is told as text."""
    called: dict[int, socket.socket] = {}
    for peer, address in doors.items():
        wire = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        wire.settimeout(timeout_s)
        called[peer] = wire
        try:
            wire.connect(address)
            _check_owner(wire)
            socket.send_fds(wire, [rank.to_bytes(4, "little")], [ring])
        except OSError as error:
            return called, f"rank {rank} cannot reach rank {peer}, which names the same host: {error}"
    return called, ""


def _answer(door: socket.socket, callers: int, rank: int, ring: int) -> Iterator[tuple[int, socket.socket, int]]:
    """Accept peers, take their rings and hand them this one."""
    for _ in range(callers):
        wire, _ = door.accept()
        _check_owner(wire)
        wire.settimeout(door.gettimeout())
        peer, their_ring = _hello(wire)
        socket.send_fds(wire, [rank.to_bytes(4, "little")], [ring])
        yield peer, wire, their_ring


def _hello(wire: socket.socket) -> tuple[int, int]:
    """Return rank and ring of who is at the other end."""
    word, rings, _, _ = socket.recv_fds(wire, 4, 1)
    if not rings:
        raise ConnectionError("a worker ended while memory was about to be shared with it")
    return int.from_bytes(word, "little"), rings[0]


def _check_owner(wire: socket.socket) -> None:
    """Abstract addresses are open to every user of the host; refuse all but this one."""
    _, user, _ = struct.unpack("3i", wire.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    if user != os.getuid():
        raise PermissionError(f"the process at the other end belongs to user {user}")
