"""Passwords of TCP connections: a peer that does not know the run's key is disconnected before it can send a message.

ZeroMQ's PLAIN mechanism (RFC 24) with an authentication handler (ZAP, RFC 27). Without it, a peer could send a message
that does not end, which ZeroMQ stores until it is complete.
"""

import contextlib
import threading
from hashlib import blake2b
from hmac import compare_digest

import zmq

MAX_FRAME = 16 << 10
"""Maximum size of a frame in bytes: what a peer can make the master store before it has sent the password."""

HANDSHAKE_S = 10.0
"""Time in which a new connection must send the password."""

USER = b"worker"


def password(key: bytes) -> bytes:
    """Return the password for a run's key, from which the key cannot be derived: it is sent unencrypted."""
    return blake2b(b"password of a connection", key=key, digest_size=32).hexdigest().encode()


def require_password(connection: zmq.Socket) -> None:
    """Let only peers with a password connect to a socket; to be called before it is bound."""
    connection.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME)
    connection.setsockopt(zmq.HANDSHAKE_IVL, int(HANDSHAKE_S * 1000))
    connection.setsockopt(zmq.PLAIN_SERVER, 1)


def accept_password(context: zmq.Context, key: bytes) -> None:
    """Accept peers with the password of ``key`` until the context is closed; to be called after the socket is bound."""
    handler = context.socket(zmq.REP)
    handler.setsockopt(zmq.LINGER, 0)
    handler.bind("inproc://zeromq.zap.01")
    threading.Thread(target=_answer_requests, args=(handler, password(key)), daemon=True).start()


def send_password(connection: zmq.Socket, key: bytes) -> None:
    """Send the password of ``key`` with every connection of a socket; to be called before it is connected."""
    connection.setsockopt(zmq.PLAIN_USERNAME, USER)
    connection.setsockopt(zmq.PLAIN_PASSWORD, password(key))


def _answer_requests(handler: zmq.Socket, expected: bytes) -> None:
    """Answer authentication requests until ``handler`` or its context is closed."""
    with contextlib.suppress(zmq.ZMQError):
        while True:
            version, request, *_, given = handler.recv_multipart()
            status = b"200" if compare_digest(given, expected) else b"400"
            handler.send_multipart([version, request, status, b"", USER, b""])
    handler.close()


def split(payload: bytes) -> list[memoryview]:
    """Return the frames of a payload, at least one; none is longer than ``MAX_FRAME``."""
    view = memoryview(payload)
    return [view[start : start + MAX_FRAME] for start in range(0, max(1, len(payload)), MAX_FRAME)]
