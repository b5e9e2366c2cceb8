"""Network addresses of this machine. Sends no packets."""

import contextlib
import fcntl
import ipaddress
import socket
import struct
from collections.abc import Iterable

SIOCGIFADDR = 0x8915
"""Linux ioctl for the address of an interface."""
ANY_PORT = 9


def address_towards(host: str) -> str:
    """Return this machine's source address for packets to ``host``; OSError without a route."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, ANY_PORT))
        return probe.getsockname()[0]


def address_for(hosts: Iterable[str]) -> str:
    """Return the address of this machine for ``hosts``; loopback only if they all are this machine."""
    for host in (*hosts, socket.gethostname()):
        with contextlib.suppress(OSError):  # an unknown name
            if not ipaddress.ip_address(address := address_towards(host)).is_loopback:
                return address
    return "127.0.0.1"


def interface_of(address: str) -> str:
    """Return the network interface with this address, or an empty string."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # an interface without an address
                reply = fcntl.ioctl(probe, SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                if socket.inet_ntoa(reply[20:24]) == address:
                    return name
    return ""


def host_of(endpoint: str) -> str:
    """Return the host of ``tcp://HOST:PORT``, or an empty string for a local socket."""
    return endpoint.removeprefix("tcp://").rpartition(":")[0] if endpoint.startswith("tcp://") else ""
