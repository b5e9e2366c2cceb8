"""Messages between master and workers: msgpack of known types over ZeroMQ, or straight calls in one process.

Every message is sealed with the key of the launch (``seal``). What is not, is said twice, is too large or comes from
nobody is dropped and counted. By default sockets live in a folder that only the owner may enter.
"""

import os
import shutil
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any, Protocol

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from realhf.api.messages import TO_MASTER, TO_WORKER, Heartbeat, Message, ToMaster, ToWorker
from realhf.base.errors import RunFailed, UserError
from realhf.system.transport.auth import AuthError, Direction, SignatureVerifier, Signer

MAX_MESSAGE = 256 << 20
HEARTBEAT = Direction.beat  # looked up once: it is asked for at every message

MASTER_LOST_S = 10.0
"""A worker whose connection was lost and has not come back for so long has no master any more."""

FIRST_CONNECTION_S = 120.0
"""The same before there was a connection: thousands of workers may be taken one after another."""


class MasterEnd(Protocol):
    """The master's side of the channel."""

    def send(self, ranks: Collection[int], message: ToWorker) -> None:
        """Say the same to workers that were heard before."""

    def receive(self, timeout_s: float) -> ToMaster | None:
        """Return the next message, or None when none came in time."""

    def close(self) -> None: ...


def encode(message: Message) -> bytes:
    """Return the bytes of a message; ``ValueError`` for one that nobody would take."""
    data = msgspec.msgpack.encode(message)
    if len(data) > MAX_MESSAGE:
        raise ValueError(f"a {type(message).__name__} of {len(data)} bytes is more than the {MAX_MESSAGE} of a message")
    return data


def decode(data: bytes, kinds: msgspec.msgpack.Decoder) -> Any:
    """Read a message; ``ValueError`` for anything that is not one of the known ``kinds``."""
    try:
        return kinds.decode(data)
    except Exception as error:
        raise ValueError(f"refused a message of {len(data)} bytes: {error}") from error


class Outbox:
    """Encodes and seals messages to the workers, once however many they go to."""

    def __init__(self, key: bytes) -> None:
        self._seal = Signer(key, Direction.to_worker)

    def sealed(self, ranks: Iterable[int], message: ToWorker) -> tuple[bytes, bytes]:
        """Return head and payload."""
        payload = encode(message)
        return self._seal.head(ranks, payload), payload


class Inbox:
    """Opens what comes from the workers, and counts in ``refused`` what comes from others."""

    def __init__(self, key: bytes, ranks: range) -> None:
        self.rejected_messages = 0
        self._gate = SignatureVerifier(key, (Direction.to_master, Direction.beat), ranks)

    def opened(self, frames: list[bytes]) -> tuple[Direction, ToMaster] | None:
        """Return a message and its lane, or None for a stranger's; ``RunFailed`` when a worker is not understood."""
        try:
            if len(frames) != 2:
                raise AuthError(f"{len(frames)} frames")
            lane, rank = self._gate.check(frames[0], frames[1])
        except AuthError:
            self.rejected_messages += 1
            return None
        try:
            message: ToMaster = decode(frames[1], TO_MASTER)
        except ValueError as error:
            raise RunFailed(f"worker {rank} is not understood: {error}") from error
        if message.rank != rank or (message.__class__ is Heartbeat) != (lane is HEARTBEAT):
            raise RunFailed(f"worker {rank} is not understood: it sent a {type(message).__name__} of {message.rank}")
        return lane, message


class ZmqMaster:
    """Binds a socket for the workers: of this host alone, or at ``address``, ``tcp://HOST:PORT`` (``*``: any port)."""

    def __init__(self, key: bytes, n_workers: int, address: str = "") -> None:
        self._inbox, self._outbox = Inbox(key, range(n_workers)), Outbox(key)
        self._routes: dict[int, bytes] = {}  # ZeroMQ's names of connections: a stranger cannot take a worker's
        self.folder = None if address else Path(tempfile.mkdtemp(prefix="realhf-"))  # mkdtemp makes it 0700
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE)
        self._socket.setsockopt(zmq.LINGER, 1000)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        try:
            self._socket.bind(address or f"ipc://{self.folder}/master")
        except zmq.ZMQError as error:
            self._context.destroy()
            raise UserError(f"channel_address={address!r}: {error}") from error
        self.address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        if self.folder is not None:
            os.chmod(self.folder / "master", 0o600)

    @property
    def rejected_messages(self) -> int:
        """Messages that were dropped, since nobody of this run has sent them."""
        return self._inbox.rejected_messages

    def send(self, ranks: Collection[int], message: ToWorker) -> None:
        head, payload = self._outbox.sealed(ranks, message)
        for rank in ranks:
            self._socket.send_multipart([self._routes[rank], head, payload], copy=False)

    def receive(self, timeout_s: float) -> ToMaster | None:
        left = deadline(timeout_s)
        while True:
            try:
                route, *frames = self._socket.recv_multipart(zmq.NOBLOCK)  # asking first takes half as long again
            except zmq.Again:
                if self._socket.poll(max(0, int(left() * 1000))):
                    continue
                return None
            if (opened := self._inbox.opened(frames)) is not None:
                lane, message = opened
                if lane is Direction.to_master:
                    self._routes[message.rank] = route
                return message
            if left() <= 0:
                return None  # many strangers make nobody wait

    def close(self) -> None:
        self._socket.close()
        self._context.term()
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)  # who tidies /tmp may have been here


class ZmqWorker:
    """A worker's side: one FIFO inbox, one way out.

    ``on_master_lost`` is called, in a thread of its own, when the master is gone: nobody else may tell a worker whose
    launcher's other half lives on another host. A master that is stopped or busy keeps its connections.
    """

    def __init__(self, address: str, rank: int, key: bytes, on_master_lost: Callable[[], None] | None = None) -> None:
        self.rejected_messages = 0
        self._address, self._rank, self._key = address, rank, key
        self._gate = SignatureVerifier(key, (Direction.to_worker,), range(rank, rank + 1))
        self._seal = Signer(key, Direction.to_master)
        self._context = zmq.Context()
        self._socket = self._connect(linger_ms=2000, on_master_lost=on_master_lost)

    def _connect(self, linger_ms: int, on_master_lost: Callable[[], None] | None = None) -> zmq.Socket:
        wire = self._context.socket(zmq.DEALER)
        wire.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE)
        wire.setsockopt(zmq.LINGER, linger_ms)
        wire.setsockopt(zmq.TCP_KEEPALIVE, 1)  # a host that is gone says nothing
        wire.setsockopt(zmq.TCP_KEEPALIVE_IDLE, 60)
        if on_master_lost is not None:  # before there is anything to see
            events = wire.get_monitor_socket(zmq.EVENT_CONNECTED | zmq.EVENT_DISCONNECTED)
            threading.Thread(target=_watch, args=(events, on_master_lost), daemon=True).start()
        wire.connect(self._address)
        return wire

    def send(self, message: ToMaster) -> None:
        payload = encode(message)
        self._socket.send_multipart([self._seal.head((self._rank,), payload), payload])

    def receive(self, timeout_s: float | None = None, waiting_for: str = "the next message") -> ToWorker:
        """Return the next message; ``RunFailed`` names what was awaited when none comes in time.

        Without a limit it takes as long as the master does: a worker without work leaves with its launcher.
        """
        left = deadline(timeout_s or 0.0)
        while timeout_s is None or self._socket.poll(max(0, int(left() * 1000))):
            frames = self._socket.recv_multipart()
            try:
                if len(frames) != 2:
                    raise AuthError(f"{len(frames)} frames")
                self._gate.check(frames[0], frames[1])
            except AuthError:
                self.rejected_messages += 1
                continue
            return decode(frames[1], TO_WORKER)
        raise RunFailed(f"no word from the master for {timeout_s:.0f} s while waiting for {waiting_for}")

    def beat_until(self, stopped: threading.Event, interval_s: float, beat: Callable[[], Heartbeat]) -> None:
        """Send a heartbeat every so often; for a thread of its own, on a connection of its own."""
        wire, seal = self._connect(linger_ms=0), Signer(self._key, Direction.beat)
        while True:
            payload = encode(beat())
            wire.send_multipart([seal.head((self._rank,), payload), payload])
            if stopped.wait(interval_s):
                wire.close()
                return

    def close(self) -> None:
        self._socket.close()
        self._context.term()


def _watch(events: zmq.Socket, on_master_lost: Callable[[], None]) -> None:
    """Follow what happens to a connection until it is lost for good, or its context ends."""
    left: Callable[[], float] | None = deadline(FIRST_CONNECTION_S)
    try:
        while left is None or left() > 0:
            if events.poll(None if left is None else max(1, int(left() * 1000))):
                lost = recv_monitor_message(events)["event"] == zmq.EVENT_DISCONNECTED
                left = deadline(MASTER_LOST_S) if lost else None
        on_master_lost()
    except zmq.ContextTerminated:
        pass
    finally:
        events.close()


class InlineChannel:
    """Master and the only worker in one process: a message is handled before ``send`` returns."""

    rejected_messages = 0

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
    """Return a function that tells the seconds left."""
    end = time.monotonic() + seconds
    return lambda: end - time.monotonic()
