"""Messages of unauthenticated peers.

``python -m tests.system.transport.hostile_peers ADDRESS ATTACK`` attacks a channel for ``ATTACK_S`` or until it is
disconnected.
"""

import contextlib
import socket
import struct
import sys
import time
from collections.abc import Callable

from realhf.base.process import raise_fd_limit
from realhf.system.transport.handshake import MAX_FRAME

KEY = bytes(range(32))
ATTACK_S, CONNECTIONS = 3.0, 2000


def greeting(mechanism: bytes) -> bytes:
    return b"\xff" + bytes(8) + b"\x7f" + b"\x03\x00" + mechanism.ljust(20, b"\0") + bytes(32)


GREETING = greeting(b"NULL")
PROPERTIES = b"\x05READY" + b"\x0bSocket-Type" + struct.pack(">I", 6) + b"DEALER"
READY = struct.pack("BB", 4, len(PROPERTIES)) + PROPERTIES


def hello(password: bytes) -> bytes:
    """Return the first command of a PLAIN client."""
    body = b"\x05HELLO" + bytes([6]) + b"worker" + bytes([len(password)]) + password
    return struct.pack("BB", 4, len(body)) + body


def connect(address: str) -> socket.socket:
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    return socket.create_connection((host, int(port)), timeout=ATTACK_S)


def oversized(address: str, nbytes: int) -> None:
    """Announce a message of ``nbytes`` in the ZeroMQ protocol, send its beginning and disconnect."""
    with connect(address) as connection:
        connection.sendall(GREETING + READY + struct.pack(">BQ", 2, nbytes) + bytes(64))


def http(address: str) -> None:
    """Send HTTP requests."""
    with connect(address) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" * 8)


def endless(beginning: bytes) -> Callable[[str], None]:
    """Send ``beginning`` and a message that does not end, in frames of 30 kB."""
    frame = struct.pack(">BQ", 3, 30_000) + bytes(30_000)

    def attack(address: str) -> None:
        end = time.monotonic() + ATTACK_S
        with connect(address) as connection, contextlib.suppress(OSError):
            connection.sendall(beginning)
            while time.monotonic() < end:
                connection.sendall(frame)

    return attack


def many(beginning: bytes) -> Callable[[str], None]:
    """Send ``beginning`` over many connections and keep them open."""

    def attack(address: str) -> None:
        raise_fd_limit()
        connections = []
        for _ in range(CONNECTIONS):
            connections.append(connect(address))
            with contextlib.suppress(OSError):
                connections[-1].sendall(beginning)
        time.sleep(ATTACK_S)

    return attack


PLAIN = greeting(b"PLAIN")
ATTACKS = {
    "endless": endless(GREETING + READY),
    "endless, plain": endless(PLAIN + READY),
    "endless, wrong password": endless(PLAIN + hello(b"0" * 64)),
    "endless, no greeting": endless(b""),
    "many, silent": many(b""),
    "many, greeted": many(PLAIN),
    "many, wrong password": many(PLAIN + hello(b"")),
    "many, largest command": many(PLAIN + struct.pack(">BQ", 6, MAX_FRAME) + bytes(MAX_FRAME - 1)),
    "many, larger than allowed": many(PLAIN + struct.pack(">BQ", 6, 1 << 40) + bytes(60_000)),
}

if __name__ == "__main__":
    ATTACKS[sys.argv[2]](sys.argv[1])
