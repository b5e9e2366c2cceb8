"""Messages of unauthenticated peers."""

import socket
import struct

KEY = bytes(range(32))
GREETING = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
PROPERTIES = b"\x05READY" + b"\x0bSocket-Type" + struct.pack(">I", 6) + b"DEALER"
READY = struct.pack("BB", 4, len(PROPERTIES)) + PROPERTIES


def oversized(address: str, nbytes: int) -> None:
    """Announce a message of ``nbytes`` in the ZeroMQ protocol, send its beginning and disconnect."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    with socket.create_connection((host, int(port)), timeout=5.0) as connection:
        connection.sendall(GREETING + READY + struct.pack(">BQ", 2, nbytes) + bytes(64))


def http(address: str) -> None:
    """Send HTTP requests."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    with socket.create_connection((host, int(port)), timeout=5.0) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" * 8)
