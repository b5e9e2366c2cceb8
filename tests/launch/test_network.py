"""Addresses, on the interfaces that every machine has."""

import socket

import pytest

from realhf.launch.network import address_for, address_towards, host_of, interface_of


def test_loopback_is_reached_by_loopback() -> None:
    assert address_towards("127.0.0.1") == "127.0.0.1"
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("192.0.2.77") == ""  # nobody's: for documentation


def test_where_all_hosts_are_this_one_loopback_will_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "localhost")
    assert address_for(["127.0.0.1", "no.such.host.invalid"]) == "127.0.0.1"


@pytest.mark.parametrize("endpoint, host", [("tcp://10.0.0.1:55", "10.0.0.1"), ("ipc:///tmp/x/master", "")])
def test_the_host_of_an_endpoint(endpoint: str, host: str) -> None:
    assert host_of(endpoint) == host
