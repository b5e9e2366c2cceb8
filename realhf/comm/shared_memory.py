"""Shared memory between the workers of one host: every sender has a small ring of slots that its receivers map.

A slot is filled once for all receivers, announced over a socket, read by each receiver and released. The ring is small
enough for the processor's cache. Memory and sockets are anonymous and are freed with the processes.
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

import msgspec
import torch
from torch import Tensor

from realhf.base.activity import ActivityStack
from realhf.comm.packets import Packet
from realhf.comm.process_groups import all_gather_bytes
from realhf.plan.cost.traffic import N_SLOTS, RING_BYTES, SLOT_BYTES

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

MESSAGE = struct.Struct("<BxHI")
"""Slot event (FILLED, EMPTIED), slot number, and number of bytes in the slot."""
FILLED, EMPTIED = 1, 2


class SharedMemoryPeers:
    """Packet transport to the workers of this host with which this rank shares memory.

    ``ranks`` are those workers, initially none. If memory is not shared with workers of this host, ``why_not`` is the
    reason. ``hosts`` maps every rank of the cluster that shares memory with its whole host to the name of that host.
    """

    def __init__(self, rank: int, timeout_s: float, activity: ActivityStack | None = None) -> None:
        self.rank, self.timeout_s, self.why_not, self.activity = rank, timeout_s, "", activity or ActivityStack()
        self.hosts: dict[int, str] = {}
        self._sockets: dict[int, socket.socket] = {}
        self._poller = select.poll()
        self._rank_of: dict[int, int] = {}
        self._rings: dict[int, Tensor] = {}  # by sender, [N_SLOTS, SLOT_BYTES] uint8
        self._readers: list[set[int]] = [set() for _ in range(N_SLOTS)]  # peers that have yet to read an own slot
        self._filled: dict[int, deque[tuple[int, int]]] = {}  # by sender: unread slots and their sizes
        self._disconnected: set[int] = set()

    @property
    def ranks(self) -> frozenset[int]:
        return frozenset(self._sockets)

    def share(self, ring: int) -> None:
        """Use the memory of file descriptor ``ring`` as this rank's own ring."""
        self._rings[self.rank] = _map(ring)

    def add_peer(self, peer: int, sock: socket.socket, ring: int) -> None:
        """Add a connected peer, whose socket has a timeout, and the file descriptor of its ring, which is closed."""
        self._sockets[peer], self._filled[peer], self._rings[peer] = sock, deque(), _map(ring)
        os.close(ring)
        self._rank_of[sock.fileno()] = peer
        self._poller.register(sock, select.POLLIN)

    def run(
        self,
        outgoing: Iterable[Packet],
        incoming: Mapping[int, Iterable[Packet]],
        pack: Callable[[Packet, Tensor], None],
        unpack: Callable[[Packet, Tensor], None],
        background: Iterator[object],
    ) -> None:
        """Send and receive all packets; each sender's packets keep their order.

        Advance ``background`` instead of waiting. TimeoutError after ``timeout_s`` without progress and ConnectionError
        when a peer exits before it has done its part name the pending packets; then the object is unusable.
        """
        to_send = iter(outgoing)
        streams = {peer: iter(packets) for peer, packets in incoming.items()}
        due = {peer: packet for peer, packets in streams.items() if (packet := next(packets, None)) is not None}
        ready = next(to_send, None)
        while ready is not None or due:
            idle = True
            if ready is not None and set() in self._readers:
                self._send(ready, pack)
                ready, idle = next(to_send, None), False
            for peer in [peer for peer in due if self._filled[peer]]:
                self._receive(peer, due.pop(peer), unpack)
                idle = False
                if (packet := next(streams[peer], None)) is not None:
                    due[peer] = packet
            if not self._poll(0.0, ready, due) and idle and next(background, None) is None:
                with self.activity.enter(self._pending(ready, due)):
                    self._poll(self.timeout_s, ready, due)

    def close(self) -> None:
        """Close the sockets; peers can still read what was sent."""
        for sock in self._sockets.values():
            sock.close()
        self._sockets, self._rings = {}, {}

    def _send(self, packet: Packet, pack: Callable[[Packet, Tensor], None]) -> None:
        slot = self._readers.index(set())
        pack(packet, self._rings[self.rank][slot])
        self._readers[slot].update(packet.dsts)
        for peer in packet.dsts:
            self._notify(peer, FILLED, slot, packet.nbytes)

    def _receive(self, peer: int, packet: Packet, unpack: Callable[[Packet, Tensor], None]) -> None:
        slot, nbytes = self._filled[peer].popleft()
        if nbytes != packet.nbytes:
            raise RuntimeError(f"rank {peer} sent {nbytes} bytes where rank {self.rank} expects {packet.nbytes}: the "
                               "ranks passed different lists of copies")  # fmt: skip
        unpack(packet, self._rings[peer][slot])
        self._notify(peer, EMPTIED, slot, nbytes)

    def _notify(self, peer: int, event: int, slot: int, nbytes: int) -> None:
        try:
            self._sockets[peer].send(MESSAGE.pack(event, slot, nbytes))
        except (BrokenPipeError, ConnectionResetError):
            self._disconnected.add(peer)  # an error only if this rank still needs the peer

    def _poll(self, timeout_s: float, ready: Packet | None, due: Mapping[int, Packet]) -> bool:
        """Read available events, waiting up to ``timeout_s`` for the first; return True if there were any."""
        needed = set(due).union(*self._readers if ready else ())
        if timeout_s and self._disconnected & needed:
            raise ConnectionError(f"a worker exited while {self._pending(ready, due)}")
        events = self._poller.poll(timeout_s * 1000)
        if timeout_s and not events:
            raise TimeoutError(f"no progress for {timeout_s:g} s while {self._pending(ready, due)}")
        for number, _ in events:
            self._read_event(self._rank_of[number])
        return bool(events)

    def _read_event(self, peer: int) -> None:
        try:
            message = self._sockets[peer].recv(MESSAGE.size)
        except ConnectionResetError:
            return  # the peer exited with unread events; its own earlier events can still be read
        if not message:
            self._disconnected.add(peer)
            self._poller.unregister(self._sockets[peer])
            return
        event, slot, nbytes = MESSAGE.unpack(message)
        if event == FILLED:
            self._filled[peer].append((slot, nbytes))
        else:
            self._readers[slot].discard(peer)

    def _pending(self, ready: Packet | None, due: Mapping[int, Packet]) -> str:
        pending = [f"{packet} from rank {peer}" for peer, packet in due.items()]
        if ready is not None:
            pending.append(f"ranks {sorted(set().union(*self._readers))} to free a slot for {ready} to {ready.dsts}")
        exited = f" (exited: {sorted(self._disconnected)})" if self._disconnected else ""
        return f"rank {self.rank} awaited {' and '.join(pending)}{exited}"


def _map(ring: int) -> Tensor:
    memory = mmap.mmap(ring, RING_BYTES)
    return torch.frombuffer(memory, dtype=torch.uint8).view(N_SLOTS, SLOT_BYTES)


def open_shared_memory_peers(
    rank: int, world: int, timeout_s: float, hosts: tuple[str, ...] | None = None, activity: ActivityStack | None = None
) -> SharedMemoryPeers:
    """Connect all workers that share a host. Collective over the default group, which must be gloo.

    ``hosts`` names the host of each rank; by default the host name and boot id are used. If two workers of a host
    cannot share memory, no worker of that host does, ``why_not`` is the reason, and ``exchange`` uses the network.
    """
    peers = SharedMemoryPeers(rank, timeout_s, activity)
    own_host = hosts[rank] if hosts else f"{socket.gethostname()} {BOOT_ID.read_text() if BOOT_ID.exists() else ''}"
    with contextlib.ExitStack() as stack:
        error_text, ring, listener = "", None, None
        try:
            ring = _new_ring()
            stack.callback(os.close, ring)
            listener = stack.enter_context(_new_listener(world, timeout_s))
        except OSError as error:
            error_text = f"rank {rank}: {error}"
        infos = _gather([own_host, error_text, listener.getsockname().decode() if listener else ""], world)
        near = [peer for peer, (host, _, _) in enumerate(infos) if host == own_host]
        connected: dict[int, socket.socket] = {}
        if ring is not None and not any(infos[peer][1] for peer in near):
            addresses = {peer: infos[peer][2] for peer in near if peer < rank}
            connected, error_text = _connect(addresses, rank, ring, timeout_s)
        failures = [failure for (failure,) in _gather([error_text], world)]
        excluded = {host for (host, _, _), failure in zip(infos, failures, strict=True) if failure}
        peers.hosts = {peer: host for peer, (host, _, _) in enumerate(infos) if host not in excluded}
        errors = [failures[peer] for peer in near if failures[peer]]
        if errors or ring is None or listener is None:
            for sock in connected.values():
                sock.close()
            peers.why_not = errors[0]
            return peers
        peers.share(ring)
        while len(peers.ranks) < sum(peer > rank for peer in near):
            sock, _ = listener.accept()
            if not _is_own_user(sock):
                sock.close()  # any user of the host can connect
                continue
            sock.settimeout(timeout_s)
            peer, their_ring = _receive_ring(sock)
            _send_ring(sock, rank, ring)
            peers.add_peer(peer, sock, their_ring)
        for peer, sock in connected.items():
            peers.add_peer(peer, sock, _receive_ring(sock)[1])
    return peers


def _gather(texts: list[str], world: int) -> list[list[str]]:
    """Return the texts of every rank."""
    gathered = all_gather_bytes(msgspec.msgpack.encode(texts)) if world > 1 else [msgspec.msgpack.encode(texts)]
    return [msgspec.msgpack.decode(data, type=list[str]) for data in gathered]


def _new_ring() -> int:
    if sys.platform != "linux":
        raise OSError(f"needs Linux, this is {sys.platform}")
    ring = os.memfd_create("realhf-ring")
    os.posix_fallocate(ring, 0, RING_BYTES)  # an error now instead of a fault at the first write
    return ring


def _new_listener(world: int, timeout_s: float) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(b"\0realhf-" + secrets.token_hex(16).encode())  # an abstract address: no file
    listener.listen(world)
    listener.settimeout(timeout_s)
    return listener


def _connect(
    addresses: Mapping[int, str], rank: int, ring: int, timeout_s: float
) -> tuple[dict[int, socket.socket], str]:
    """Connect to peers and send each the ring; return the sockets, and the first error as text."""
    connected: dict[int, socket.socket] = {}
    for peer, address in addresses.items():
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        sock.settimeout(timeout_s)
        connected[peer] = sock
        try:
            sock.connect(address)
            if not _is_own_user(sock):
                raise PermissionError("its process belongs to another user")
            _send_ring(sock, rank, ring)
        except OSError as error:
            return connected, f"rank {rank} cannot connect to rank {peer}, which names the same host: {error}"
    return connected, ""


def _send_ring(sock: socket.socket, rank: int, ring: int) -> None:
    socket.send_fds(sock, [rank.to_bytes(4, "little")], [ring])


def _receive_ring(sock: socket.socket) -> tuple[int, int]:
    """Return the rank of the peer and the file descriptor of its ring."""
    data, rings, _, _ = socket.recv_fds(sock, 4, 1)
    if not rings:
        raise ConnectionError("a worker exited before it shared its memory")
    return int.from_bytes(data, "little"), rings[0]


def _is_own_user(sock: socket.socket) -> bool:
    _, user, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    return user == os.getuid()
