"""Connections to the master's TCP channel without the run's password are closed soon, however many there are."""

import contextlib
import socket

import pytest

from realhf.api.messages import Hello
from realhf.system.transport import handshake
from realhf.system.transport.channel import ZmqMaster, ZmqWorker
from tests.system.transport.hostile_peers import GREETING, KEY, PLAIN, READY, connect, hello

HANDSHAKE_S, LIMIT_S, CONNECTIONS = 0.5, 20.0, 40
"""The limit is less than the 30 s after which ZeroMQ closes a connection of itself."""
BEGINNINGS = {
    "silent": b"",
    "no mechanism": GREETING,
    "no password": GREETING + READY,
    "greeted": PLAIN,
    "wrong password": PLAIN + hello(b"0" * 64),
}


def is_closed(connection: socket.socket) -> bool:
    """Wait for the end of a connection."""
    connection.settimeout(LIMIT_S)
    try:
        while connection.recv(4096):
            pass
    except TimeoutError:
        return False
    except ConnectionError:
        pass
    return True


@pytest.mark.parametrize("name", BEGINNINGS)
def test_connections_without_the_password_are_closed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake, "HANDSHAKE_S", HANDSHAKE_S)
    with contextlib.ExitStack() as stack:
        master = ZmqMaster(KEY, 2, "tcp://127.0.0.1:*")
        stack.callback(master.close)
        worker = ZmqWorker(master.address, 1, KEY)
        stack.callback(worker.close)
        connections = [stack.enter_context(connect(master.address)) for _ in range(CONNECTIONS)]
        for connection in connections:
            with contextlib.suppress(ConnectionError):
                connection.sendall(BEGINNINGS[name])
        worker.send(message := Hello(1, pid=1, host="here", port=0))
        assert master.receive(LIMIT_S) == message
        assert all(map(is_closed, connections))
        worker.send(message)
        assert master.receive(LIMIT_S) == message
