"""Messages between master and workers: msgpack of known types over ZeroMQ, or straight calls in one process.

Sockets live in a folder that only the owner may enter. A worker names itself by its rank; anything that does not
decode to a known message is refused.
"""

import os
import tempfile
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import msgpack
import zmq

from realhf.api.codec import from_plain, to_plain
from realhf.api.messages import ToMaster, ToWorker
from realhf.base.errors import RunFailed

MAX_MESSAGE = 1 << 30


class MasterEnd(Protocol):
    """The master's side of the channel."""

    def send(self, rank: int, message: ToWorker) -> None: ...

    def receive(self, timeout_s: float) -> ToMaster | None:
        """Return the next message, or None when none came in time."""

    def close(self) -> None: ...


def encode(message: object, union: object) -> bytes:
    return msgpack.packb(to_plain(message, union))


def decode(data: bytes, union: type) -> object:
    """Read a message; ``ValueError`` for anything that is not one of the known types."""
    try:
        return from_plain(msgpack.unpackb(data), union)
    except Exception as error:
        raise ValueError(f"refused a message of {len(data)} bytes: {error}") from error


class ZmqMaster:
    """Binds a socket for the workers: of this host alone, or at ``address``, ``tcp://HOST:PORT`` (``*``: any port).

    ``refused`` counts what strangers sent: it is passed over.
    """

    def __init__(self, address: str = "") -> None:
        self.refused = 0
        self._known: set[bytes] = set()
        self.folder = None if address else Path(tempfile.mkdtemp(prefix="realhf-"))  # mkdtemp makes it 0700
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE)
        self._socket.setsockopt(zmq.LINGER, 1000)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.bind(address or f"ipc://{self.folder}/master")
        self.address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        if self.folder is not None:
            os.chmod(self.folder / "master", 0o600)

    def send(self, rank: int, message: ToWorker) -> None:
        self._socket.send_multipart([b"%d" % rank, encode(message, ToWorker)])

    def receive(self, timeout_s: float) -> ToMaster | None:
        left = deadline(timeout_s)
        while self._socket.poll(max(0, int(left() * 1000))):
            sender, *frames = self._socket.recv_multipart()
            if (message := self._read(sender, frames)) is not None:
                return message
        return None

    def _read(self, sender: bytes, frames: list[bytes]) -> ToMaster | None:
        """Decode what a worker sent; ``RunFailed`` when one that was understood before sends anything else."""
        try:
            message: ToMaster = decode(b"".join(frames), ToMaster)  # type: ignore[assignment, arg-type]
            if sender != b"%d" % message.rank:
                raise ValueError(f"refused a message of worker {message.rank} that came from {sender!r}")
        except ValueError as error:
            if sender in self._known:
                raise RunFailed(f"worker {sender.decode()} is not understood: {error}") from error
            self.refused += 1
            return None
        self._known.add(sender)
        return message

    def close(self) -> None:
        self._socket.close()
        self._context.term()
        if self.folder is not None:
            (self.folder / "master").unlink(missing_ok=True)
            self.folder.rmdir()


class ZmqWorker:
    """A worker's side: one FIFO inbox, one way out."""

    def __init__(self, address: str, rank: int) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.IDENTITY, b"%d" % rank)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE)
        self._socket.setsockopt(zmq.LINGER, 2000)
        self._socket.connect(address)

    def send(self, message: ToMaster) -> None:
        self._socket.send(encode(message, ToMaster))

    def receive(self, timeout_s: float | None = None, waiting_for: str = "the next message") -> ToWorker:
        """Return the next message; ``RunFailed`` names what was awaited when none comes in time.

        Without a limit it takes as long as the master does: a worker without work leaves with its launcher.
        """
        if timeout_s is not None and not self._socket.poll(int(timeout_s * 1000)):
            raise RunFailed(f"no word from the master for {timeout_s:.0f} s while waiting for {waiting_for}")
        return decode(self._socket.recv(), ToWorker)  # type: ignore[return-value, arg-type]

    def close(self) -> None:
        self._socket.close()
        self._context.term()


class InlineChannel:
    """Master and the only worker in one process: a message is handled before ``send`` returns."""

    def __init__(self) -> None:
        self._replies: deque[ToMaster] = deque()
        self.handler: Callable[[ToWorker], None] = lambda message: None

    def send(self, rank: int, message: ToWorker) -> None:
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
