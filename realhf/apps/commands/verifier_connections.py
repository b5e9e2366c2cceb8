"""Connections of the verifier service: limits per client and in total, and a deadline for the headers of a request."""

import asyncio
from collections.abc import Hashable, Mapping
from typing import Any

from uvicorn.protocols.http.flow_control import service_unavailable
from uvicorn.protocols.http.h11_impl import H11Protocol

HEADER_TIMEOUT_S = 10.0  # without a request in progress; a connection is closed within twice this time


def crowded(clients: Mapping[Any, Hashable], client: Hashable, per_client: int, total: int) -> list[Any]:
    """Return the open connections, oldest first, of which one has to be closed before ``client`` opens another.

    ``clients`` maps each open connection to its client, in the order of their arrival.
    """
    own = [connection for connection, owner in clients.items() if owner == client]
    if len(own) >= per_client:
        return own
    return list(clients) if len(clients) >= total else []


class LimitedConnection(H11Protocol):
    """An HTTP connection. A new one beyond a limit replaces the oldest one without a request in progress.

    If all have one, the new connection gets status 503. Half-open connections therefore do not block others.
    """

    per_client: int
    total: int
    clients: "dict[LimitedConnection, Hashable]"  # of open connections, in the order of their arrival

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        address = self.client[0] if self.client else None
        if others := crowded(self.clients, address, self.per_client, self.total):
            idle = next((connection for connection in others if connection.is_idle), None)
            if idle is None:
                self.app = service_unavailable  # type: ignore[assignment]
            else:
                idle.drop()
        self.clients[self] = address
        self.idle_since = self.loop.time()
        self.timer = self.loop.call_later(HEADER_TIMEOUT_S, self.check_idle)

    def connection_lost(self, exc: Exception | None) -> None:
        self.clients.pop(self, None)
        self.timer.cancel()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        self.idle_since = self.loop.time()
        super().on_response_complete()

    @property
    def is_idle(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def check_idle(self) -> None:
        if self.is_idle and self.loop.time() - self.idle_since >= HEADER_TIMEOUT_S:
            self.drop()
        else:
            self.timer = self.loop.call_later(HEADER_TIMEOUT_S, self.check_idle)

    def drop(self) -> None:
        self.clients.pop(self, None)
        self.transport.abort()


def limited_connections(per_client: int, total: int) -> type[LimitedConnection]:
    """Return the protocol class of one server, whose connections share the limits."""
    return type("Connection", (LimitedConnection,), {"per_client": per_client, "total": total, "clients": {}})
