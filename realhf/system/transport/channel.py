"""Channels between master and workers: signed msgpack messages over ZeroMQ, or direct calls within one process.

Unauthenticated, replayed and oversized messages are dropped and counted. By default the socket is in a private folder.
"""

import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from realhf.api.messages import TO_MASTER, TO_WORKER, Heartbeat, Message, ToMaster, ToWorker
from realhf.base.errors import RunFailed, UserError
from realhf.system.transport.auth import Direction, SignatureVerifier, Signer
from realhf.system.transport.handshake import accept_password, require_password, send_password, split

MAX_MESSAGE = 256 << 20
HEARTBEAT = Direction.heartbeat  # a global: attribute access on an enum is slow, and every message needs it

MASTER_LOST_S = 10.0
"""A worker exits when its connection has been down for this long."""

FIRST_CONNECTION_S = 120.0
"""The same before the first connection: a master accepts thousands of workers one by one."""


class MasterEnd(Protocol):
    """The master's side of the channel."""

    def send(self, ranks: Collection[int], message: ToWorker) -> None:
        """Send a message to workers that have sent one before."""

    def receive(self, timeout_s: float) -> ToMaster | None:
        """Return the next message, or None after the timeout."""

    def close(self) -> None: ...


def encode(message: Message) -> bytes:
    """Return the bytes of a message; ``ValueError`` if it is too large."""
    data = msgspec.msgpack.encode(message)
    if len(data) > MAX_MESSAGE:
        raise ValueError(f"a {type(message).__name__} of {len(data)} bytes exceeds the limit of {MAX_MESSAGE}")
    return data


def decode(data: bytes, kinds: msgspec.msgpack.Decoder) -> Any:
    """Return a message of one of ``kinds``; ``ValueError`` for other bytes."""
    try:
        return kinds.decode(data)
    except Exception as error:
        raise ValueError(f"invalid message of {len(data)} bytes: {error}") from error


def pack(signer: Signer, ranks: Iterable[int], message: Message) -> tuple[bytes, bytes]:
    """Return header and payload of a signed message."""
    payload = encode(message)
    return signer.sign(ranks, payload), payload


def unpack(verifier: SignatureVerifier, frames: list[bytes]) -> tuple[Direction, ToMaster] | None:
    """Return direction and message; None if unauthenticated; ``RunFailed`` for an invalid one of a worker."""
    if (origin := verifier.accept(frames)) is None:
        return None
    direction, rank = origin
    try:
        message: ToMaster = decode(frames[1], TO_MASTER)
    except ValueError as error:
        raise RunFailed(f"worker {rank} sent an invalid message: {error}") from error
    if message.rank != rank or (message.__class__ is Heartbeat) != (direction is HEARTBEAT):
        raise RunFailed(f"worker {rank} sent an invalid message: a {type(message).__name__} of {message.rank}")
    return direction, message


def close_when_collected(owner: object, connection: zmq.Socket, context: zmq.Context) -> Callable[[], object]:
    """Return a function that closes both once, and call it when ``owner`` is garbage-collected.

    pyzmq's own finalizer of a context in a reference cycle waits for its sockets, which are not closed yet.
    """

    def close() -> None:
        connection.close()
        context.term()

    finalizer = weakref.finalize(owner, close)
    finalizer.atexit = False
    return finalizer


class ZmqMaster:
    """Binds a private ipc socket, or a socket at ``address``, ``tcp://HOST:PORT`` (``*``: any port)."""

    def __init__(self, key: bytes, n_workers: int, address: str = "") -> None:
        self._verifier = SignatureVerifier(key, (Direction.to_master, Direction.heartbeat), range(n_workers))
        self._signer = Signer(key, Direction.to_worker)
        self._routes: dict[int, bytes] = {}  # ZeroMQ's identities of connections: a peer cannot take a worker's
        # of mode 0700; it removes itself if a signal interrupts this constructor, or its caller before it calls close
        self._private = None if address else TemporaryDirectory(prefix="realhf-", ignore_cleanup_errors=True)
        self.folder = None if self._private is None else Path(self._private.name)
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 1000)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        if address:
            require_password(self._socket)
        try:
            self._socket.bind(address or f"ipc://{self.folder}/master")
        except zmq.ZMQError as error:
            self._context.destroy()
            raise UserError(f"channel_address={address!r}: {error}") from error
        if address:
            accept_password(self._context, key)
        self.address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        if self.folder is not None:
            os.chmod(self.folder / "master", 0o600)
        self._close = close_when_collected(self, self._socket, self._context)

    @property
    def rejected_messages(self) -> int:
        """Number of unauthenticated messages."""
        return self._verifier.rejected

    def send(self, ranks: Collection[int], message: ToWorker) -> None:
        header, payload = pack(self._signer, ranks, message)
        for rank in ranks:
            self._socket.send_multipart([self._routes[rank], header, payload], copy=False)

    def receive(self, timeout_s: float) -> ToMaster | None:
        left = deadline(timeout_s)
        while True:
            try:
                route, *frames = self._socket.recv_multipart(zmq.NOBLOCK)  # 1.5 times as fast as polling first
            except zmq.Again:
                if self._socket.poll(max(0, int(left() * 1000))):
                    continue
                return None
            if len(frames) > 2:
                frames[1:] = [b"".join(frames[1:])]
            if (unpacked := unpack(self._verifier, frames)) is not None:
                direction, message = unpacked
                if direction is Direction.to_master:
                    self._routes[message.rank] = route
                return message
            if left() <= 0:
                return None  # also under a flood of unauthenticated messages

    def close(self) -> None:
        self._close()
        if self._private is not None:
            self._private.cleanup()


class ZmqWorker:
    """A worker's side: one FIFO inbox, one outgoing connection.

    ``on_master_lost`` is called in a separate thread when the connection to the master is lost: on another host, only
    the connection shows that the master has exited. A stopped or busy master keeps its connections.
    """

    def __init__(self, address: str, rank: int, key: bytes, on_master_lost: Callable[[], None] | None = None) -> None:
        self._address, self._rank, self._key = address, rank, key
        self.verifier = SignatureVerifier(key, (Direction.to_worker,), range(rank, rank + 1))
        self._signer = Signer(key, Direction.to_master)
        self._context = zmq.Context()
        self._socket = self._connect(linger_ms=2000, on_master_lost=on_master_lost)
        self.close = close_when_collected(self, self._socket, self._context)

    def _connect(self, linger_ms: int, on_master_lost: Callable[[], None] | None = None) -> zmq.Socket:
        connection = self._context.socket(zmq.DEALER)
        connection.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE)
        connection.setsockopt(zmq.LINGER, linger_ms)
        if self._address.startswith("tcp:"):
            send_password(connection, self._key)
        connection.setsockopt(zmq.TCP_KEEPALIVE, 1)  # detects the loss of a host
        connection.setsockopt(zmq.TCP_KEEPALIVE_IDLE, 60)
        if on_master_lost is not None:  # before connecting: no event is missed
            events = connection.get_monitor_socket(zmq.EVENT_CONNECTED | zmq.EVENT_DISCONNECTED)
            threading.Thread(target=_monitor_connection, args=(events, on_master_lost), daemon=True).start()
        connection.connect(self._address)
        return connection

    def send(self, message: ToMaster) -> None:
        header, payload = pack(self._signer, (self._rank,), message)
        self._socket.send_multipart([header, *split(payload)])

    def receive(self, timeout_s: float | None = None, waiting_for: str = "the next message") -> ToWorker:
        """Return the next message; ``RunFailed`` after the timeout. Without a timeout, wait indefinitely."""
        left = deadline(timeout_s or 0.0)
        while timeout_s is None or self._socket.poll(max(0, int(left() * 1000))):
            frames = self._socket.recv_multipart()
            if self.verifier.accept(frames) is not None:
                return decode(frames[1], TO_WORKER)
        raise RunFailed(f"no message from the master for {timeout_s:.0f} s while waiting for {waiting_for}")

    def send_heartbeats(self, stopped: threading.Event, interval_s: float, heartbeat: Callable[[], Heartbeat]) -> None:
        """Send heartbeats at an interval over a second connection; for a separate thread."""
        connection, signer = self._connect(linger_ms=0), Signer(self._key, Direction.heartbeat)
        while True:
            connection.send_multipart(pack(signer, (self._rank,), heartbeat()))
            if stopped.wait(interval_s):
                connection.close()
                return


def _monitor_connection(events: zmq.Socket, on_master_lost: Callable[[], None]) -> None:
    """Follow the events of a connection until it is lost permanently or its context is closed."""
    left: Callable[[], float] | None = deadline(FIRST_CONNECTION_S)
    try:
        while left is None or left() > 0:
            if events.poll(None if left is None else max(1, int(left() * 1000))):
                is_lost = recv_monitor_message(events)["event"] == zmq.EVENT_DISCONNECTED
                left = deadline(MASTER_LOST_S) if is_lost else None
        on_master_lost()
    except zmq.ContextTerminated:
        pass
    finally:
        events.close()


class InlineChannel:
    """Master and the only worker in one process: ``send`` returns after the message is handled."""

    def __init__(self) -> None:
        self._replies: deque[ToMaster] = deque()
        self.handler: Callable[[ToWorker], None] = lambda message: None

    def send(self, ranks: Collection[int], message: ToWorker) -> None:
        for _ in ranks:
            self.handler(message)

    def reply(self, message: ToMaster) -> None:
        self._replies.append(message)

    def receive(self, timeout_s: float) -> ToMaster | None:
        return self._replies.popleft() if self._replies else None

    def close(self) -> None:
        self._replies.clear()


def deadline(seconds: float) -> Callable[[], float]:
    """Return a function that returns the seconds left."""
    end = time.monotonic() + seconds
    return lambda: end - time.monotonic()
