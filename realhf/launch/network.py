"""Addresses by which processes on several machines find each other. Nothing is sent."""

import contextlib
import fcntl
import ipaddress
import socket
import struct
from collections.abc import Iterable

SIOCGIFADDR = 0x8915
"""Linux's question for the address of an interface."""
ANY_PORT = 9


def address_towards(host: str) -> str:
    """Return the address of this machine that packets to ``host`` leave from; OSError where there is no way."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, ANY_PORT))
        return probe.getsockname()[0]


def address_for(hosts: Iterable[str]) -> str:
    """Return the address by which ``hosts`` reach this machine: of loopback only where they all are this machine."""
    for host in (*hosts, socket.gethostname()):
        with contextlib.suppress(OSError):  # a name that means nothing here
            if not ipaddress.ip_address(address := address_towards(host)).is_loopback:
                return address
    return "127.0.0.1"


def interface_of(address: str) -> str:
    """Return the name of the network interface that has this address, or an empty text."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # an interface without an address
                answer = fcntl.ioctl(probe, SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                if socket.inet_ntoa(answer[20:24]) == address:
                    return name
    return ""


def host_of(endpoint: str) -> str:
    """Return the host of ``tcp://HOST:PORT``, or an empty text for a socket of this machine."""
    return endpoint.removeprefix("tcp://").rpartition(":")[0] if endpoint.startswith("tcp://") else ""
